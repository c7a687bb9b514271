/** Arrays with a shape and a dtype as numpy names it. */
import { BundleError } from "./errors";

export type Dtype =
  | "bool" | "int8" | "int16" | "int32" | "int64" | "uint8" | "uint16" | "uint32" | "uint64" | "float16" | "float32" | "float64";

export type Values =
  | Int8Array | Int16Array | Int32Array | BigInt64Array | Uint8Array | Uint16Array | Uint32Array | BigUint64Array
  | Float32Array | Float64Array;

/** `data` in C order. bool is held as bytes, float16 as its bits. */
export interface Arr {
  dtype: Dtype;
  shape: number[];
  data: Values;
}

const KINDS = {
  bool: Uint8Array, int8: Int8Array, int16: Int16Array, int32: Int32Array, int64: BigInt64Array, uint8: Uint8Array,
  uint16: Uint16Array, uint32: Uint32Array, uint64: BigUint64Array, float16: Uint16Array, float32: Float32Array,
  float64: Float64Array,
} as const;

export const isDtype = (name: string): name is Dtype => Object.hasOwn(KINDS, name);
export const isFloat = (dtype: Dtype): boolean => dtype.startsWith("float");
export const isWhole = (dtype: Dtype): boolean => dtype.includes("int");

export function itemBytes(dtype: Dtype): number {
  return KINDS[dtype].BYTES_PER_ELEMENT;
}

export function sizeOf(shape: readonly number[]): number {
  return shape.reduce((product, extent) => product * extent, 1);
}

export function bytesOf(port: { dtype: string; shape: readonly number[] }): number {
  return itemBytes(port.dtype as Dtype) * sizeOf(port.shape);
}

export function zeros(dtype: Dtype, shape: readonly number[]): Arr {
  return { dtype, shape: [...shape], data: new KINDS[dtype](sizeOf(shape)) };
}

/** The array whose bytes, little-endian in C order, are `bytes`; copied, so that it stands by itself. */
export function fromBytes(dtype: Dtype, shape: readonly number[], bytes: Uint8Array): Arr {
  const size = sizeOf(shape) * itemBytes(dtype);
  if (bytes.length !== size) throw new BundleError(`an array of ${size} bytes has ${bytes.length}`);
  const own = bytes.slice();
  return { dtype, shape: [...shape], data: new KINDS[dtype](own.buffer) as Values };
}

/** The memory of an array. */
export function asBytes(array: Arr): Uint8Array {
  return new Uint8Array(array.data.buffer, array.data.byteOffset, array.data.byteLength);
}

export function sameShape(one: readonly number[], other: readonly number[]): boolean {
  return one.length === other.length && one.every((extent, axis) => extent === other[axis]);
}

/** Rows `indices` of an array. */
export function rowsOf(array: Arr, indices: ArrayLike<number>): Arr {
  const width = sizeOf(array.shape.slice(1));
  const picked = zeros(array.dtype, [indices.length, ...array.shape.slice(1)]);
  const [to, from] = [picked.data as Uint8Array, array.data as Uint8Array];
  for (let place = 0; place < indices.length; place++) {
    const start = indices[place]! * width;
    to.set(from.subarray(start, start + width), place * width);
  }
  return picked;
}

/** The number that half-precision bits stand for. */
export function fromHalf(bits: number): number {
  const sign = bits & 0x8000 ? -1 : 1;
  const exponent = (bits >> 10) & 31;
  const fraction = bits & 1023;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return sign * (exponent ? 2 ** (exponent - 15) * (1 + fraction / 1024) : 2 ** -14 * (fraction / 1024));
}

/** An array of numbers as float32, rounded. */
export function toFloat32(array: Arr): Arr {
  if (array.dtype === "float32") return array;
  const data = array.dtype === "float16"
    ? Float32Array.from(array.data as Uint16Array, fromHalf)
    : Float32Array.from(array.data as ArrayLike<number | bigint>, Number);
  return { dtype: "float32", shape: array.shape, data };
}

/** The first entry, as a number. */
export function scalarOf(array: Arr): number {
  const first = array.data[0];
  return array.dtype === "float16" ? fromHalf(Number(first)) : Number(first);
}
