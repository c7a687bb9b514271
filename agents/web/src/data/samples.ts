/** Local data: checked against the manifest, and the rows of a batch. */
import { type Arr, type Dtype, isFloat, isWhole, rowsOf, sameShape, toFloat32, zeros } from "../wire/arrays";
import { DataError } from "../wire/errors";
import type { DataSpec, Input } from "../wire/bundle/manifest";
import { checkBelow, checkFinite, checkRange } from "./checks";
import { classCounts, fittedLabels, type LabelSpec } from "./labels";

/** Row numbers. */
export type Rows = Int32Array;

/** Samples of which some rows are asked for at a time. */
export interface RowSource {
  dtype: Dtype;
  take(rows: Rows): Promise<Arr>;
}

/** The samples of a device, before a bundle says how they are read. */
export interface LocalSamples {
  source: string;
  count: number;
  /** The data as the manifest wants them; DataError says what differs. */
  fitted(spec: DataSpec, label: LabelSpec): Promise<FittedData>;
}

/** Arrays as they lie in a file. */
export class LocalArrays implements LocalSamples {
  readonly count: number;

  constructor(
    private readonly x: Arr,
    private readonly y: Arr,
    private readonly others: Record<string, Arr>,
    readonly source: string,
  ) {
    if (!x.shape.length || !y.shape.length) {
      throw new DataError(`${source} should hold arrays of samples and labels, found single values`);
    }
    if (x.shape[0] !== y.shape[0] || !y.shape[0]) {
      throw new DataError(`${source} has ${x.shape[0]} samples and ${y.shape[0]} labels: it needs as many, and at least one`);
    }
    checkFinite("x", x, source);
    checkFinite("y", y, source);
    this.count = y.shape[0];
  }

  static of(arrays: Record<string, Arr>, source: string): LocalArrays {
    const { x, y, ...others } = arrays;
    if (x === undefined || y === undefined) {
      throw new DataError(`${source} holds ${Object.keys(arrays).join(", ") || "nothing"}: it needs the arrays x and y`);
    }
    return new LocalArrays(x, y, others, source);
  }

  fitted(spec: DataSpec, label: LabelSpec): Promise<FittedData> {
    const x = this.shaped(spec);
    const others = Object.fromEntries(spec.others.map((each) => [each.name, this.other(each)]));
    const y = fittedLabels(this.y, label, spec.classes, this.source);
    const rows: RowSource = { dtype: x.dtype, take: (indices) => Promise.resolve(rowsOf(x, indices)) };
    return Promise.resolve(new FittedData(rows, y, spec, others, label, lengthsOf(x, spec)));
  }

  private shaped(spec: DataSpec): Arr {
    let x = this.x;
    if (sameShape([1, ...x.shape.slice(1)], spec.shape)) x = { ...x, shape: [x.shape[0]!, ...spec.shape] };
    if (!sameShape(x.shape.slice(1), spec.shape)) {
      throw new DataError(
        `${this.source}: samples have shape (${x.shape.slice(1)}), the model takes (${spec.shape}): convert the data, or ` +
          "join a federation that trains on it",
      );
    }
    const dtype = spec.dtype as Dtype;
    if (x.dtype !== dtype && !isWhole(x.dtype)) {
      throw new DataError(
        `${this.source}: samples are ${x.dtype}, the model takes ${dtype} or integers to be scaled: convert them`,
      );
    }
    if (isWhole(dtype)) {
      if (spec.below) checkBelow("samples", x, spec.below, this.source);
      else checkRange("samples", x, dtype, this.source);
    }
    return x;
  }

  private other(wanted: Input): Arr {
    const found = this.others[wanted.name];
    const dtype = wanted.dtype as Dtype;
    if (found === undefined) {
      const there = Object.keys(this.others).join(", ");
      throw new DataError(
        `${this.source} has no array '${wanted.name}', which the model reads of each sample beside x: ${dtype} (n, ` +
          `${wanted.shape.join(", ")})${there ? `; beside x and y there is ${there}` : ""}`,
      );
    }
    if (!sameShape(found.shape, [this.count, ...wanted.shape]) || (isFloat(found.dtype) && !isFloat(dtype))) {
      throw new DataError(
        `${this.source}: ${wanted.name} is ${found.dtype} (${found.shape}), the model takes ${dtype} (${this.count}, ` +
          `${wanted.shape.join(", ")})`,
      );
    }
    if (isFloat(dtype)) checkFinite(wanted.name, found, this.source);
    else if (wanted.below) checkBelow(wanted.name, found, wanted.below, this.source);
    else if (dtype !== "bool") checkRange(wanted.name, found, dtype, this.source);
    return asDtype(found, dtype);
  }
}

/** Data that fit the model. Whole numbers are scaled when a batch is drawn, not before. */
export class FittedData {
  constructor(
    private readonly x: RowSource,
    private readonly y: Arr,
    readonly spec: DataSpec,
    readonly others: Record<string, Arr>,
    private readonly label: LabelSpec,
    /** Tokens of each sample up to its last one that is no padding. */
    readonly lengths: Int32Array,
    readonly count = y.shape[0]!,
  ) {}

  /** A batch of spec.dtype, (rows, *spec.shape). */
  async rows(indices: Rows): Promise<Arr> {
    return asRead(await this.x.take(indices), this.spec);
  }

  labels(indices: Rows): Arr {
    return asDtype(rowsOf(this.y, indices), this.label.dtype);
  }

  other(name: string, indices: Rows): Arr {
    return rowsOf(this.others[name]!, indices);
  }

  /** What a program may ask about these samples as a whole, by the label of its `data` port. */
  facts(): Record<string, Arr> {
    const width = this.y.data.length / this.y.shape[0]!;
    const first = { ...this.y, shape: [this.count, ...this.y.shape.slice(1)], data: this.y.data.subarray(0, this.count * width) };
    const counts = classCounts(first, this.label, this.spec.classes);
    return counts === null ? {} : { class_counts: counts };
  }

  /** The rows with these numbers. */
  chosen(at: Rows): FittedData {
    const x: RowSource = { dtype: this.x.dtype, take: (indices) => this.x.take(indices.map((place) => at[place]!)) };
    const others = Object.fromEntries(Object.entries(this.others).map(([name, rows]) => [name, rowsOf(rows, at)]));
    return new FittedData(x, rowsOf(this.y, at), this.spec, others, this.label, at.map((row) => this.lengths[row]!));
  }

  /** At most so many rows; all of them for 0. */
  first(samples: number): FittedData {
    const count = samples ? Math.min(samples, this.count) : this.count;
    return new FittedData(this.x, this.y, this.spec, this.others, this.label, this.lengths.subarray(0, count), count);
  }
}

/** Samples as the model reads them: x * scale + shift, each rounded to the model's type, for whole numbers. */
export function asRead(samples: Arr, spec: DataSpec): Arr {
  const dtype = spec.dtype as Dtype;
  if (samples.dtype === dtype) return samples;
  if (!isFloat(dtype)) return asDtype(samples, dtype);
  const values = samples.data as ArrayLike<number | bigint>;
  const floats = zeros(dtype, samples.shape);
  const data = floats.data as Float32Array;
  const single = dtype === "float32";
  const scale = single ? Math.fround(spec.scale) : spec.scale;
  const shift = single ? Math.fround(spec.shift) : spec.shift;
  for (let at = 0; at < data.length; at++) {
    data[at] = Number(values[at]);
    data[at] = data[at]! * scale;
    data[at] = data[at]! + shift;
  }
  return floats;
}

function asDtype(array: Arr, dtype: Dtype): Arr {
  if (array.dtype === dtype) return array;
  if (dtype === "float32") return toFloat32(array);
  const made = zeros(dtype, array.shape);
  const values = array.data as ArrayLike<number | bigint>;
  if (made.data instanceof BigInt64Array || made.data instanceof BigUint64Array) {
    for (let at = 0; at < values.length; at++) made.data[at] = BigInt(values[at]!);
  } else if (dtype === "bool") for (let at = 0; at < values.length; at++) made.data[at] = Number(values[at]) ? 1 : 0;
  else for (let at = 0; at < values.length; at++) made.data[at] = Number(values[at]);
  return made;
}

function lengthsOf(x: Arr, spec: DataSpec): Int32Array {
  const count = x.shape[0]!;
  const whole = spec.shape[0] ?? 1;
  if (!spec.below || spec.shape.length !== 1) return new Int32Array(count).fill(whole);
  const tokens = x.data as ArrayLike<number | bigint>;
  return Int32Array.from({ length: count }, (_, row) => {
    let length = whole;
    while (length > 1 && Number(tokens[row * whole + length - 1]) === 0) length--;
    return length;
  });
}
