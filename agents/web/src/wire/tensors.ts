/** Named tensors as bytes: safetensors. A packed mask may travel as gaps; only this file knows. */
import { type Arr, asBytes, type Dtype, fromBytes, itemBytes, sizeOf } from "./arrays";
import { fromGaps, toGaps } from "./bits";
import { joined, utf8 } from "./digests";
import { ProtocolError } from "./errors";

export type Arrays = Record<string, Arr>;

const NAMES: Record<string, Dtype> = {
  BOOL: "bool", I8: "int8", I16: "int16", I32: "int32", I64: "int64", U8: "uint8", U16: "uint16", U32: "uint32",
  U64: "uint64", F16: "float16", F32: "float32", F64: "float64",
};
const CODES = Object.fromEntries(Object.entries(NAMES).map(([code, dtype]) => [dtype, code])) as Record<Dtype, string>;
/** Where equally aligned, the library orders by dtype, the later of these first. */
const ORDER = ["bool", "uint8", "int8", "int16", "uint16", "float16", "int32", "uint32", "float32", "float64", "int64", "uint64"];
const GAPS = /^([^~]*)~gaps:(0|[1-9][0-9]{0,18})$/;
const MOST_HEADER = 100_000_000;
const MOST_MASK_BITS = 2 ** 33;

interface Entry {
  dtype: string;
  shape: number[];
  data_offsets: [number, number];
}

/** By bytes of UTF-8, which is by code point. */
export function byName(one: string, other: string): number {
  const [a, b] = [utf8(one), utf8(other)];
  for (let at = 0; at < a.length && at < b.length; at++) if (a[at] !== b[at]) return a[at]! - b[at]!;
  return a.length - b.length;
}

/** Bytes that are equal for equal arrays. `masks`: which are packed masks, with their number of entries. */
export function dump(arrays: Arrays, masks: Record<string, number> = {}): Uint8Array {
  const stored: Arrays = {};
  for (const [name, array] of Object.entries(arrays)) {
    const count = masks[name];
    const gaps = count === undefined ? null : toGaps(asBytes(array), count);
    if (gaps !== null && gaps.length < array.data.length) {
      stored[`${name}~gaps:${count}`] = { dtype: "uint8", shape: [gaps.length], data: gaps };
    } else stored[name] = array;
  }
  const order = (name: string) => ORDER.indexOf(stored[name]!.dtype);
  const names = Object.keys(stored).sort((one, other) => order(other) - order(one) || byName(one, other));
  let end = 0;
  const header: [string, Entry][] = names.map((name) => {
    const array = stored[name]!;
    const start = end;
    end += array.data.byteLength;
    return [name, { dtype: CODES[array.dtype], shape: array.shape, data_offsets: [start, end] }];
  });
  let text = utf8(`{${header.map(([name, entry]) => `${JSON.stringify(name)}:${JSON.stringify(entry)}`).join(",")}}`);
  text = joined([text, new Uint8Array((8 - (text.length % 8)) % 8).fill(32)]);
  const length = new Uint8Array(8);
  new DataView(length.buffer).setUint32(0, text.length, true);
  return joined([length, text, ...names.map((name) => asBytes(stored[name]!))]);
}

/** The arrays of a blob, masks packed; ProtocolError for anything that is not as it should be. */
export function load(data: Uint8Array, maxBits = MOST_MASK_BITS): Arrays {
  const found: Arrays = Object.create(null);
  let bits = maxBits;
  for (const [entry, array] of entriesOf(data)) {
    if (!entry.includes("~")) {
      put(found, entry, array);
      continue;
    }
    const match = GAPS.exec(entry);
    if (match === null) {
      throw new ProtocolError(`a blob holds '${entry}', and '~' marks an encoding that this version does not know`);
    }
    const count = Number(match[2]);
    if (count > bits || array.dtype !== "uint8" || array.shape.length !== 1) {
      throw new ProtocolError(`mask '${match[1]}' of ${count} entries has too many, or its gaps are no uint8 of one dimension`);
    }
    bits -= count;
    const packed = fromGaps(asBytes(array), count);
    put(found, match[1]!, { dtype: "uint8", shape: [packed.length], data: packed });
  }
  return found;
}

function put(found: Arrays, name: string, array: Arr): void {
  if (name in found) throw new ProtocolError(`a blob holds tensor '${name}' twice; send it once`);
  found[name] = array;
}

function entriesOf(data: Uint8Array): [string, Arr][] {
  const invalid = (why: string) => new ProtocolError(`tensor bytes are not valid safetensors: ${why}`);
  if (data.length < 8) throw invalid("they are shorter than 8 bytes");
  const length = Number(new DataView(data.buffer, data.byteOffset).getBigUint64(0, true));
  if (length > MOST_HEADER || 8 + length > data.length) throw invalid(`the header of ${length} bytes is too long`);
  let header: Record<string, Entry>;
  try {
    header = JSON.parse(new TextDecoder("utf-8", { fatal: true }).decode(data.subarray(8, 8 + length)));
  } catch (error) {
    throw invalid(`the header cannot be read (${String(error)})`);
  }
  if (typeof header !== "object" || header === null || Array.isArray(header)) throw invalid("the header is no map");
  const listed = Object.entries(header).filter(([name]) => name !== "__metadata__");
  listed.sort(([, one], [, other]) => startOf(one) - startOf(other));
  let end = 0;
  const found = listed.map(([name, entry]): [string, Arr] => {
    const dtype = NAMES[entry?.dtype];
    if (dtype === undefined) throw invalid(`'${name}' has the type ${String(entry?.dtype)}`);
    if (!Array.isArray(entry.shape) || !entry.shape.every((extent) => Number.isSafeInteger(extent) && extent >= 0)) {
      throw invalid(`'${name}' has no shape`);
    }
    const [start, stop] = entry.data_offsets;
    if (start !== end || stop - start !== sizeOf(entry.shape) * itemBytes(dtype) || 8 + length + stop > data.length) {
      throw invalid(`'${name}' lies at ${start} to ${stop}`);
    }
    end = stop;
    return [name, fromBytes(dtype, entry.shape, data.subarray(8 + length + start, 8 + length + stop))];
  });
  if (8 + length + end !== data.length) throw invalid("something follows the tensors");
  return found;
}

function startOf(entry: Entry): number {
  const start = entry?.data_offsets?.[0];
  if (!Number.isSafeInteger(start)) throw new ProtocolError("tensor bytes are not valid safetensors: no data_offsets");
  return start!;
}
