/** What leads from the weights that a device has to the next ones: codes of eight bits per entry, with the server's bits. */
import { type Arr, sameShape, toFloat32 } from "./arrays";
import { BundleError, ProtocolError } from "./errors";
import { type Arrays, byName, load } from "./tensors";

const SCALES = "/scales";
const MOST = 127;

function unfit(why: string): BundleError {
  return new BundleError(`a patch does not fit the weights it is for: ${why}; the server must publish it again`);
}

/** What travelled as float16 in float32, which graphs read; the rest as it is. */
export function widened(weights: Arrays): Arrays {
  for (const [name, array] of Object.entries(weights)) if (array.dtype === "float16") weights[name] = toFloat32(array);
  return weights;
}

/** The weights after the patch `data`; BundleError if it does not belong to them, or leads beyond float32. */
export function patched(weights: Arrays, data: Uint8Array): Arrays {
  let changes: Arrays;
  try {
    changes = load(data, 0);
  } catch (error) {
    if (error instanceof ProtocolError) throw unfit(error.message);
    throw error;
  }
  const scales = changes[SCALES];
  delete changes[SCALES];
  const coded = Object.keys(changes).filter((name) => changes[name]!.dtype === "int8").sort(byName);
  if (scales?.dtype !== "float32" || !sameShape(scales.shape, [coded.length])) {
    throw unfit(`it should hold ${coded.length} float32 scales`);
  }
  if (![...(scales.data as Float32Array)].every(Number.isFinite)) throw unfit("a scale is not finite");
  const moved: Arrays = Object.assign(Object.create(null), weights);
  for (const [name, change] of Object.entries(changes)) {
    const old = weights[name];
    if (old === undefined) throw unfit(`the weights have no tensor '${name}'`);
    const wanted = change.dtype === "int8" ? "float32" : change.dtype;
    if (!sameShape(change.shape, old.shape) || old.dtype !== wanted) {
      throw unfit(`tensor '${name}' is ${change.dtype} (${change.shape}), for one of ${old.dtype} (${old.shape})`);
    }
    const place = coded.indexOf(name);
    moved[name] = place < 0 ? change : stepped(name, old, change, (scales.data as Float32Array)[place]!);
  }
  return moved;
}

/** A / 127, the product and the sum are each rounded to float32. */
function stepped(name: string, old: Arr, codes: Arr, scale: number): Arr {
  const step = Math.fround(scale / MOST);
  const [from, by] = [old.data as Float32Array, codes.data as Int8Array];
  const data = new Float32Array(from.length);
  for (let at = 0; at < data.length; at++) {
    data[at] = from[at]! + Math.fround(by[at]! * step);
    if (!Number.isFinite(data[at])) throw unfit(`tensor '${name}' would hold NaN or infinity`);
  }
  return { dtype: "float32", shape: old.shape, data };
}
