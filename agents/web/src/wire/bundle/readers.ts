/** How a device's own files become samples, as a manifest says it. */
import { BlobRef } from "../blobs";
import { ProtocolError } from "../errors";
import type { Value, Writer } from "../msgpack";
import { bool, type Codec, dict, float, int, list, nullable, omitted, oneOf, type Read, required, str, struct } from "../schema";

const tag = <const K extends string>(kind: K) => ({ kind: required(oneOf(kind)) });
const floats = () => omitted(list(float), () => []);

const Image = struct("Image", { ...tag("image"), white: omitted(int, () => 255) });
const Table = struct("Table", {
  ...tag("table"),
  columns: required(list(str)),
  label: required(str),
  mean: floats(),
  deviation: floats(),
  others: omitted(dict(list(str)), () => ({})),
});
const Series = struct("Series", {
  ...tag("series"),
  columns: required(list(str)),
  window: required(int),
  step: required(int),
  label: omitted(str, () => ""),
  mean: floats(),
  deviation: floats(),
  channels_last: omitted(bool, () => false),
});
const Sound = struct("Sound", {
  ...tag("sound"),
  rate: required(int),
  length: required(int),
  mels: omitted(int, () => 0),
  window: omitted(int, () => 0),
  step: omitted(int, () => 0),
  features: omitted(str, () => ""),
});
const Text = struct("Text", {
  ...tag("text"),
  tokenizer: omitted(nullable(BlobRef), () => null),
  mask: omitted(str, () => ""),
  text: omitted(str, () => "text"),
  label: omitted(str, () => "label"),
});

const KINDS = { image: Image, table: Table, series: Series, sound: Sound, text: Text };
export type Reader = Read<(typeof KINDS)[keyof typeof KINDS]>;

export const Reader: Codec<Reader> = {
  read(value: Value, path: string): Reader {
    const kind = value instanceof Map ? value.get("kind") : undefined;
    if (typeof kind !== "string" || !Object.hasOwn(KINDS, kind)) {
      throw new ProtocolError(`this device knows no reader of kind '${String(kind)}' (${path}): install a newer edgefl`);
    }
    return KINDS[kind as keyof typeof KINDS].read(value, path);
  },
  write(out: Writer, value: Reader): void {
    (KINDS[value.kind] as Codec<Reader>).write(out, value);
  },
};

/** What cannot be used about a reader, "" for nothing. */
export function problemOf(reader: Reader): string {
  if (reader.kind === "image") return reader.white > 0 && reader.white <= 255 ? "" : `white is ${reader.white}, of 1 to 255`;
  if (reader.kind === "sound") {
    if (reader.rate < 1 || reader.length < 1) return "rate and length are at least 1";
    if (reader.mels && (reader.window < 1 || reader.step < 1)) return "window and step are at least 1";
    return reader.mels < 0 || (reader.mels && reader.window > reader.length) ? `mels ${reader.mels} cannot be made` : "";
  }
  if (reader.kind === "text") return "";
  if (reader.kind === "series" && (reader.window < 1 || reader.step < 1)) return "window and step are at least 1";
  if (!reader.columns.length || new Set(reader.columns).size < reader.columns.length) return "columns: at least one, each once";
  const uneven = [reader.mean, reader.deviation].some((each) => each.length && each.length !== reader.columns.length);
  if (uneven) return `mean and deviation have other lengths than the ${reader.columns.length} columns`;
  return reader.deviation.includes(0) ? "a deviation is 0" : "";
}
