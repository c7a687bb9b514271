/** Blobs in the store, chunk by chunk; the least recently used leave first. */
import { type BlobRef, countOf } from "../wire/blobs";
import { joined } from "../wire/digests";
import { StoreError } from "../wire/errors";
import type { Store } from "./store";

export class BlobStore {
  constructor(private readonly store: Store, private readonly limit: number) {}

  /** Indices of the chunks that are not here yet. A blob of no bytes is always here. */
  async missing(ref: BlobRef): Promise<number[]> {
    if (ref.size === 0) return [];
    const keys = await this.store.db.getAllKeys("chunks", IDBKeyRange.bound([ref.sha256, 0], [ref.sha256, Infinity]));
    const here = new Set(keys.map(([, index]) => index));
    return Array.from({ length: countOf(ref) }, (_, index) => index).filter((index) => !here.has(index));
  }

  /** Keep one checked chunk. */
  async put(ref: BlobRef, index: number, data: Uint8Array): Promise<void> {
    await this.store.write(["blobs", "chunks"], (writing) => {
      void writing.objectStore("blobs").put({ size: ref.size, usedAt: Date.now() }, ref.sha256);
      void writing.objectStore("chunks").put(data, [ref.sha256, index]);
    });
  }

  /** Drop blobs until `needed` fit; StoreError if they never can. */
  async makeRoom(needed: readonly BlobRef[]): Promise<void> {
    const sum = needed.reduce((total, ref) => total + ref.size, 0);
    if (sum > this.limit) {
      throw new StoreError(
        `the blobs of this round have ${sum} bytes, the store may hold ${this.limit}: raise limits.store_bytes or ask for a ` +
          "smaller tier",
      );
    }
    await this.dropOldest(sum, new Set(needed.map((ref) => ref.sha256)));
  }

  /** Drop blobs until something of `bytes` beside them fits. */
  async dropOldest(bytes: number, keep: ReadonlySet<string> = new Set()): Promise<void> {
    const db = this.store.db;
    const names = (await db.getAllKeys("blobs")).filter((name) => !keep.has(name));
    const rows = await Promise.all(names.map(async (name) => ({ name, ...(await db.get("blobs", name))! })));
    rows.sort((one, other) => one.usedAt - other.usedAt);
    let used = bytes + rows.reduce((total, row) => total + row.size, 0);
    for (const row of rows) {
      if (used <= this.limit) return;
      await this.drop(row.name);
      used -= row.size;
    }
  }

  /** The whole blob, unchecked; fewer bytes than `ref.size` if chunks are missing. */
  async get(ref: BlobRef): Promise<Uint8Array> {
    await this.store.write(["blobs"], (writing) =>
      void writing.objectStore("blobs").put({ size: ref.size, usedAt: Date.now() }, ref.sha256));
    const range = IDBKeyRange.bound([ref.sha256, 0], [ref.sha256, Infinity]);
    return joined(await this.store.db.getAll("chunks", range));
  }

  async drop(sha256: string): Promise<void> {
    await this.store.write(["blobs", "chunks"], (writing) => {
      void writing.objectStore("blobs").delete(sha256);
      void writing.objectStore("chunks").delete(IDBKeyRange.bound([sha256, 0], [sha256, Infinity]));
    });
  }
}
