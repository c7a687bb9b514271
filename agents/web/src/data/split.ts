/** The rows that a bundle uses: all of them, or the training or the held-out part (docs/protocol.md, Held-out rows). */
import { type Arr, asBytes } from "../wire/arrays";
import type { Manifest, Split } from "../wire/bundle/manifest";
import { digest, joined } from "../wire/digests";
import { DataError } from "../wire/errors";
import { labelSpecOf } from "./labels";
import type { FittedData, LocalSamples } from "./samples";

/** Rows that are read together. */
const BLOCK = 256;
/** Flags of the held-out rows, by the data, and by what describes them and their division. The data do not change. */
const known = new WeakMap<LocalSamples, Map<string, Uint8Array>>();

/** The rows of `source` that `manifest` uses; DataError if the data do not fit, or if none is in its part. */
export async function fitRows(source: LocalSamples, manifest: Manifest): Promise<FittedData> {
  const data = await source.fitted(manifest.data, labelSpecOf(manifest));
  const split = manifest.split;
  if (split === undefined) return data;
  const heldOut = await heldOutRows(source, data, split);
  const wanted = split.part === "held-out" ? 1 : 0;
  const at = Int32Array.from(heldOut.keys()).filter((row) => heldOut[row] === wanted);
  if (at.length) return data.chosen(at);
  throw new DataError(`${source.source}: none of its ${data.count} rows is in the ${split.part} part: it needs more rows`);
}

/** 1 for each row that is held out, 0 for the others. */
async function heldOutRows(source: LocalSamples, data: FittedData, split: Split): Promise<Uint8Array> {
  const divisions = known.get(source) ?? new Map<string, Uint8Array>();
  known.set(source, divisions);
  const key = JSON.stringify([data.spec, split.share, String(split.seed)]);
  const found = divisions.get(key) ?? (await divided(data, split));
  divisions.set(key, found);
  return found;
}

async function divided(data: FittedData, split: Split): Promise<Uint8Array> {
  const most = BigInt(Math.floor(split.share * 2 ** 64));
  const seed = asBytes({ dtype: "uint64", shape: [1], data: BigUint64Array.of(split.seed) });
  const flags = new Uint8Array(data.count);
  for (let first = 0; first < data.count; first += BLOCK) {
    const block = Int32Array.from({ length: Math.min(BLOCK, data.count - first) }, (_, place) => first + place);
    const inputs = [await data.rows(block), ...data.spec.others.map((each) => data.other(each.name, block))];
    for (const [place, row] of block.entries()) {
      const hash = await digest(joined([seed, ...inputs.map((rows) => bytesOfRow(rows, place))]));
      flags[row] = new DataView(hash.buffer, hash.byteOffset).getBigUint64(0, true) < most ? 1 : 0;
    }
  }
  return flags;
}

function bytesOfRow(rows: Arr, row: number): Uint8Array {
  const width = rows.data.byteLength / rows.shape[0]!;
  return asBytes(rows).subarray(row * width, (row + 1) * width);
}
