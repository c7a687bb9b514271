/** Arrays of numpy: an .npz is a zip of .npy files. */
import { unzipSync } from "fflate";
import { type Arr, type Dtype, fromBytes, itemBytes, sizeOf } from "../wire/arrays";
import { DataError } from "../wire/errors";

const KINDS: Record<string, Dtype> = {
  "|b1": "bool", "|i1": "int8", "<i2": "int16", "<i4": "int32", "<i8": "int64", "|u1": "uint8", "<u2": "uint16", "<u4": "uint32",
  "<u8": "uint64", "<f2": "float16", "<f4": "float32", "<f8": "float64",
};

/** The arrays of an .npz by name; DataError for anything else. */
export function readNpz(bytes: Uint8Array, source: string): Record<string, Arr> {
  let files: Record<string, Uint8Array>;
  try {
    files = unzipSync(bytes);
  } catch (error) {
    throw new DataError(`${source} cannot be read as training data: it is no .npz (${String(error)})`);
  }
  const arrays = Object.entries(files).filter(([name]) => name.endsWith(".npy"));
  return Object.fromEntries(arrays.map(([name, data]) => [name.slice(0, -4), readNpy(data, `${source}, ${name}`)]));
}

/** One array of an .npy file. */
export function readNpy(data: Uint8Array, source: string): Arr {
  const view = new DataView(data.buffer, data.byteOffset, data.byteLength);
  if (data.length < 12 || view.getUint32(0) !== 0x934e554d) throw new DataError(`${source} is no .npy file`);
  const long = data[6]! > 1;
  const start = long ? 12 : 10;
  const end = start + (long ? view.getUint32(8, true) : view.getUint16(8, true));
  const header = new TextDecoder("latin1").decode(data.subarray(start, end));
  const descr = /'descr':\s*'([^']*)'/.exec(header)?.[1] ?? "";
  const dtype = KINDS[descr];
  const shape = (/'shape':\s*\(([^)]*)\)/.exec(header)?.[1] ?? "").split(",").filter((part) => part.trim()).map(Number);
  if (dtype === undefined || shape.some((extent) => !Number.isSafeInteger(extent))) {
    throw new DataError(`${source} holds ${descr || "something"} that is no array of numbers`);
  }
  const bytes = data.subarray(end, end + sizeOf(shape) * itemBytes(dtype));
  if (bytes.length !== sizeOf(shape) * itemBytes(dtype)) throw new DataError(`${source} is cut short`);
  const array = fromBytes(dtype, shape, bytes);
  return /'fortran_order':\s*True/.test(header) && shape.length > 1 ? inRows(array) : array;
}

/** The same array in C order, of one whose values lie in Fortran's. */
function inRows(array: Arr): Arr {
  const data = array.data.slice() as Uint8Array;
  const from = array.data as Uint8Array;
  const strides = array.shape.map((_, axis) => sizeOf(array.shape.slice(0, axis)));
  for (let at = 0; at < data.length; at++) {
    let place = 0;
    let rest = at;
    for (let axis = array.shape.length - 1; axis >= 0; axis--) {
      place += (rest % array.shape[axis]!) * strides[axis]!;
      rest = Math.floor(rest / array.shape[axis]!);
    }
    data[at] = from[place]!;
  }
  return { ...array, data };
}
