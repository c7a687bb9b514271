/** zstd for blobs: a frame is unfolded only where it says, and turns out, to hold what its reference promises. */
import { decompress } from "fzstd";
import type { BlobRef } from "./blobs";
import { BundleError } from "./errors";

const MAGIC = 0xfd2fb528;
const LEAST_WINDOW_LOG = 10;

/** The blob's own bytes from those that travelled, which were verified. */
export function unpacked(ref: BlobRef, data: Uint8Array): Uint8Array {
  if (!ref.codec) return data;
  const refused = (why: string) =>
    new BundleError(
      `blob ${ref.sha256.slice(0, 12)} is no zstd frame of ${ref.raw} bytes (${why}); the server must publish it again`,
    );
  const frame = headOf(data);
  if (frame === null) throw refused("it does not begin as one");
  if (frame.content !== ref.raw) throw refused(`its frame claims ${frame.content} bytes`);
  const most = 2 ** Math.max(LEAST_WINDOW_LOG, Math.ceil(Math.log2(Math.max(1, ref.raw))));
  if (frame.window > most) throw refused(`its window has ${frame.window} bytes`);
  if (endOf(data, frame.blocks, frame.checksum) !== data.length) throw refused("it is cut off, or something follows it");
  let content: Uint8Array;
  try {
    content = decompress(data, new Uint8Array(ref.raw));
  } catch (error) {
    throw refused(String(error));
  }
  if (content.length !== ref.raw) throw refused(`it unfolds to ${content.length} bytes`);
  return content;
}

interface Head {
  content: number;
  window: number;
  blocks: number;
  checksum: boolean;
}

/** RFC 8878, 3.1.1.1; null for what is no frame, names no size of its content, or needs a dictionary. */
function headOf(data: Uint8Array): Head | null {
  if (data.length < 6) return null;
  const view = new DataView(data.buffer, data.byteOffset, data.byteLength);
  if (view.getUint32(0, true) !== MAGIC) return null;
  const flags = data[4]!;
  const single = Boolean(flags & 32);
  const sizeBytes = [single ? 1 : 0, 2, 4, 8][flags >> 6]!;
  if (flags & 3 || flags & 8 || !sizeBytes) return null;
  let at = 5;
  let window = 0;
  if (!single) {
    const log = 10 + (data[at]! >> 3);
    window = 2 ** log + (2 ** log / 8) * (data[at]! & 7);
    at++;
  }
  if (at + sizeBytes > data.length) return null;
  const content = sizeBytes === 1 ? data[at]!
    : sizeBytes === 2 ? view.getUint16(at, true) + 256
      : sizeBytes === 4 ? view.getUint32(at, true) : Number(view.getBigUint64(at, true));
  return { content, window: single ? content : window, blocks: at + sizeBytes, checksum: Boolean(flags & 4) };
}

/** Where the frame ends, by its blocks; -1 if it is cut off. */
function endOf(data: Uint8Array, start: number, checksum: boolean): number {
  for (let at = start; at + 3 <= data.length;) {
    const head = data[at]! | (data[at + 1]! << 8) | (data[at + 2]! << 16);
    const kind = (head >> 1) & 3;
    at += 3 + (kind === 1 ? 1 : head >> 3);
    if (head & 1) return at + (checksum ? 4 : 0);
  }
  return -1;
}
