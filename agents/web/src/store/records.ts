/** Recorded boundary activations: rows in the store, group by group, tagged with what they belong to. */
import { type Arr, bytesOf, type Dtype, fromBytes, asBytes, sizeOf, zeros } from "../wire/arrays";
import type { Store } from "./store";

/** Rows of `shape.slice(1)`; only the groups that are asked for are ever in memory, and the last ones that were. */
export class Record {
  private readonly cached = new Map<number, Arr>();

  constructor(
    private readonly store: Store,
    readonly place: number,
    readonly shape: number[],
    readonly dtype: Dtype,
    private readonly group: number,
    private readonly cachedGroups: number,
  ) {}

  /** The sealed record of chunk `place` that belongs to `tag`; null if there is none. */
  static async reopen(store: Store, place: number, tag: string, group: number, cacheBytes: number): Promise<Record | null> {
    const head = await store.db.get("heads", place);
    if (head?.tag !== tag) return null;
    return new Record(store, place, head.shape, head.dtype as Dtype, group, fitting(head, group, cacheBytes));
  }

  /** An empty record; it counts as written only after `seal`. */
  static async create(store: Store, place: number, shape: number[], dtype: Dtype, group: number, cacheBytes: number): Promise<Record> {
    await dropRecord(store, place);
    return new Record(store, place, shape, dtype, group, fitting({ shape, dtype }, group, cacheBytes));
  }

  get count(): number {
    return this.shape[0]!;
  }

  async write(start: number, rows: Arr): Promise<void> {
    await this.store.write(["records"], (writing) =>
      void writing.objectStore("records").put(asBytes(rows).slice(), [this.place, start / this.group]));
  }

  /** Flush the rows, then the tag that makes them valid. */
  async seal(tag: string): Promise<void> {
    const head = { tag, shape: this.shape, dtype: this.dtype };
    await this.store.write(["heads"], (writing) => void writing.objectStore("heads").put(head, this.place), true);
  }

  async rows(indices: Int32Array): Promise<Arr> {
    const width = sizeOf(this.shape.slice(1));
    const picked = zeros(this.dtype, [indices.length, ...this.shape.slice(1)]);
    for (const [place, index] of indices.entries()) {
      const number = Math.floor(index / this.group);
      const group = this.cached.get(number) ?? (await this.read(number));
      const from = (index - number * this.group) * width;
      (picked.data as Uint8Array).set((group.data as Uint8Array).subarray(from, from + width), place * width);
    }
    return picked;
  }

  private async read(number: number): Promise<Arr> {
    const bytes = await this.store.db.get("records", [this.place, number]);
    const rows = Math.min(this.group, this.count - number * this.group);
    const group = fromBytes(this.dtype, [rows, ...this.shape.slice(1)], bytes ?? new Uint8Array());
    if (this.cached.size >= this.cachedGroups) this.cached.delete(this.cached.keys().next().value!);
    this.cached.set(number, group);
    return group;
  }

  async delete(): Promise<void> {
    await dropRecord(this.store, this.place);
  }
}

function fitting(head: { shape: number[]; dtype: string }, group: number, cacheBytes: number): number {
  const bytes = bytesOf({ dtype: head.dtype, shape: [group, ...head.shape.slice(1)] });
  return Math.max(1, Math.floor(cacheBytes / Math.max(1, bytes)));
}

async function dropRecord(store: Store, place: number): Promise<void> {
  await store.write(["heads", "records"], (writing) => {
    void writing.objectStore("heads").delete(place);
    void writing.objectStore("records").delete(IDBKeyRange.bound([place, 0], [place, Infinity]));
  });
}
