/** Protocol buffers, as far as a model is written again with a few fields changed: the rest keeps its bytes. */
import { joined } from "../wire/digests";
import { BundleError } from "../wire/errors";

const VARINT = 0;
const LEN = 2;
/** Bytes of a value of fixed length, by its wire type. */
const FIXED: Record<number, number> = { 1: 8, 5: 4 };

/** One field: its number, its whole bytes, and its content where that has a length. */
export interface Field {
  number: number;
  whole: Uint8Array;
  content: Uint8Array | null;
}

/** The fields of a message in their order; BundleError for what is none. */
export function fieldsOf(data: Uint8Array): Field[] {
  const found: Field[] = [];
  for (let at = 0; at < data.length;) {
    const start = at;
    const [tag, value] = varint(data, at);
    const kind = tag % 8;
    let [end, content]: [number, Uint8Array | null] = [value, null];
    if (kind === VARINT) [, end] = varint(data, value);
    else if (kind === LEN) {
      const [length, first] = varint(data, value);
      end = first + length;
      content = data.subarray(first, end);
    } else if (kind in FIXED) end += FIXED[kind]!;
    else throw cut();
    if (end > data.length) throw cut();
    found.push({ number: Math.floor(tag / 8), whole: data.subarray(start, end), content });
    at = end;
  }
  return found;
}

/** A field of a number with this content. */
export function field(number: number, content: Uint8Array): Uint8Array {
  return joined([written(8 * number + LEN), written(content.length), content]);
}

/** A field of a number with this whole number, from 0. */
export function whole(number: number, value: number): Uint8Array {
  return joined([written(8 * number + VARINT), written(value)]);
}

/** The number at a place, and where it ends. Beyond 2^53, which no length has, it is only passed over. */
function varint(data: Uint8Array, at: number): [value: number, end: number] {
  let value = 0;
  for (let place = 0; place < 10; place++) {
    const byte = data[at + place];
    if (byte === undefined) throw cut();
    value += (byte & 127) * 2 ** (7 * place);
    if (byte < 128) return [value, at + place + 1];
  }
  throw cut();
}

function written(value: number): Uint8Array {
  const bytes: number[] = [];
  for (; value >= 128; value = Math.floor(value / 128)) bytes.push((value % 128) | 128);
  return Uint8Array.from([...bytes, value]);
}

function cut(): BundleError {
  return new BundleError("the graph is cut short, or no ONNX model; export the bundle again");
}
