/** One sample's label: whole numbers are classes (one, or one per token), floats are answers or targets. */
import { type Arr, type Dtype, isFloat, sameShape, toFloat32, zeros } from "../wire/arrays";
import { DataError } from "../wire/errors";
import { inputsOf, labelOf, type Port } from "../wire/bundle/graphs";
import { graphOf, type Manifest } from "../wire/bundle/manifest";
import { checkFinite } from "./checks";

export interface LabelSpec {
  shape: number[];
  dtype: Dtype;
  /** A number that stands beside the classes and counts for nothing. */
  ignored: number | null;
}

/** What the bundle's graphs read as labels; one class number where none of them reads any. */
export function labelSpecOf(manifest: Manifest): LabelSpec {
  const names = [...manifest.phases.map((phase) => phase.graph), manifest.evaluate];
  const ports: Port[] = names.flatMap((name) => inputsOf(graphOf(manifest, name), "batch"));
  const port = ports.find((each) => labelOf(each).endsWith(".y"));
  if (port === undefined) return { shape: [], dtype: "int64", ignored: null };
  return { shape: port.shape.slice(1), dtype: port.dtype as Dtype, ignored: port.ignored };
}

/** `y` as the model takes it: floats in their dtype, classes checked; DataError says what differs. */
export function fittedLabels(y: Arr, spec: LabelSpec, classes: number, source: string): Arr {
  const array = shaped(y, spec, classes, source);
  if (isFloat(spec.dtype)) {
    const floats = spec.dtype === "float32" ? toFloat32(array) : { ...array, dtype: spec.dtype, data: Float64Array.from(array.data as Float64Array, Number) };
    checkFinite("labels", floats, source, "the model takes finite numbers");
    return floats;
  }
  const values = array.data as ArrayLike<number | bigint>;
  let [least, most] = [Infinity, -Infinity];
  for (let at = 0; at < values.length; at++) {
    const value = Number(values[at]);
    if (value === spec.ignored) continue;
    least = Math.min(least, value);
    most = Math.max(most, value);
  }
  if (isFloat(array.dtype) || array.dtype === "bool" || least < 0 || most >= classes) {
    const beside = spec.ignored === null ? "" : `, or ${spec.ignored} for none`;
    throw new DataError(
      `${source}: labels are ${array.dtype} from ${least} to ${most}, the model takes integers from 0 to ${classes - 1}${beside}`,
    );
  }
  return array;
}

function shaped(y: Arr, spec: LabelSpec, classes: number, source: string): Arr {
  const shape = sameShape(spec.shape, [1]) && y.shape.length === 1 ? [...y.shape, 1] : y.shape;
  if (!sameShape(shape.slice(1), spec.shape)) {
    const wanted = spec.shape.length ? `${spec.dtype} (${spec.shape})` : "one number";
    throw new DataError(
      `${source}: labels have shape (${y.shape}), the model takes ${wanted} per sample (${classes} classes)`,
    );
  }
  return { ...y, shape };
}

/** How often each class occurs, int64 (classes,); null where labels are no classes. */
export function classCounts(y: Arr, spec: LabelSpec, classes: number): Arr | null {
  if (isFloat(y.dtype)) return null;
  const counts = zeros("int64", [classes]);
  const into = counts.data as BigInt64Array;
  const values = y.data as ArrayLike<number | bigint>;
  for (let at = 0; at < values.length; at++) {
    const value = Number(values[at]);
    if (value !== spec.ignored) into[value]! += 1n;
  }
  return counts;
}
