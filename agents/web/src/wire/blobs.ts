/** Immutable bytes named by their SHA-256, and the chunks that carry them. */
import { digest, equal, fromHex, hex } from "./digests";
import { BundleError } from "./errors";
import { bytes, encoded, int, omitted, oneOf, type Read, required, str, struct } from "./schema";

const DIGEST_BYTES = 32;
/** Half of the largest packet of MQTT. */
const MOST_CHUNK_BYTES = 2 ** 27;
export const SHA256 = /^[0-9a-f]{64}$/;

export const BlobRef = struct("BlobRef", {
  sha256: required(str),
  size: required(int),
  chunk: required(int),
  digests: omitted(bytes, () => new Uint8Array()),
  codec: omitted(oneOf("", "zstd"), () => "" as const),
  raw: omitted(int, () => 0),
});
export type BlobRef = Read<typeof BlobRef>;

/** Number of chunks. An empty blob has one, which is empty. */
export function countOf(ref: BlobRef): number {
  return Math.max(1, Math.ceil(ref.size / ref.chunk));
}

/** Return true if `data` is chunk `index` of the blob, by its length and its digest. */
export async function accepts(ref: BlobRef, index: number, data: Uint8Array): Promise<boolean> {
  const count = countOf(ref);
  if (index < 0 || index >= count || data.length !== Math.min(ref.chunk, ref.size - index * ref.chunk)) return false;
  const wanted = count === 1 ? fromHex(ref.sha256) : ref.digests.subarray(index * DIGEST_BYTES, (index + 1) * DIGEST_BYTES);
  return equal(await digest(data), wanted);
}

/** Whether both describe the same bytes in the same way: a digest alone says nothing of a size that somebody claims. */
export function sameRef(one: BlobRef, other: BlobRef | null | undefined): boolean {
  return other != null && equal(encoded(BlobRef, one), encoded(BlobRef, other));
}

/** BundleError if the reference contradicts itself or exceeds `limit` bytes, also unfolded. */
export function checkRef(ref: BlobRef, limit: number): void {
  const sound = ref.size >= 0 && ref.chunk > 0 && SHA256.test(ref.sha256);
  const listed = sound && ref.digests.length === (countOf(ref) === 1 ? 0 : countOf(ref) * DIGEST_BYTES);
  const malformed = `blob reference ${ref.sha256.slice(0, 12)} is malformed; ask the server to publish it again`;
  if (!listed || (ref.codec ? ref.raw <= 0 : ref.raw !== 0)) throw new BundleError(malformed);
  const largest = Math.max(ref.size, ref.raw);
  if (largest > limit) {
    throw new BundleError(
      `blob ${ref.sha256.slice(0, 12)} has ${largest} bytes, more than the limit of ${limit}: raise ` +
        "limits.max_blob_bytes or give this device a smaller tier",
    );
  }
  if (ref.chunk > MOST_CHUNK_BYTES) throw new BundleError(malformed);
}

/** `data` if its size and digest are those of `ref`, else BundleError. */
export async function verified(ref: BlobRef, data: Uint8Array): Promise<Uint8Array> {
  if (data.length !== ref.size || hex(await digest(data)) !== ref.sha256) {
    throw new BundleError(
      `blob ${ref.sha256.slice(0, 12)} is damaged: ${data.length} of ${ref.size} bytes, digest differs; fetch it again`,
    );
  }
  return data;
}

/** Pieces of `data` in order; one empty piece for empty data. */
export function split(data: Uint8Array, chunk: number): Uint8Array[] {
  const count = Math.max(1, Math.ceil(data.length / chunk));
  return Array.from({ length: count }, (_, index) => data.subarray(index * chunk, (index + 1) * chunk));
}

/** The reference of `data` cut into chunks. */
export async function describe(data: Uint8Array, chunk: number, raw = 0): Promise<BlobRef> {
  const pieces = split(data, chunk);
  const digests = new Uint8Array(pieces.length > 1 ? pieces.length * DIGEST_BYTES : 0);
  for (const [index, piece] of pieces.entries()) {
    if (pieces.length > 1) digests.set(await digest(piece), index * DIGEST_BYTES);
  }
  return { sha256: hex(await digest(data)), size: data.length, chunk, digests, codec: raw ? "zstd" : "", raw };
}
