/**
 * The device's store, in IndexedDB: blobs, the open job, its checkpoint, the outbox, carries and history. Each method that
 * writes is one transaction. What is small is held in memory too, so that it can be asked without waiting; a lock keeps
 * other tabs out, so nobody else writes.
 */
import { type DBSchema, type IDBPDatabase, type IDBPTransaction, openDB } from "idb";
import { StoreError } from "../wire/errors";
import type { Checkpoint, Job, Outgoing, PastRound, StoredCarry } from "./rows";

interface CarryRow {
  name: string;
  nonce: string;
  round: number;
  data: Uint8Array;
}

export interface Schema extends DBSchema {
  blobs: { key: string; value: { size: number; usedAt: number } };
  chunks: { key: [string, number]; value: Uint8Array };
  job: { key: number; value: Job };
  checkpoint: { key: number; value: Checkpoint };
  outbox: { key: number; value: Outgoing };
  carries: { key: number; value: CarryRow };
  facts: { key: string; value: unknown };
  history: { key: string; value: PastRound & { at: number } };
  records: { key: [number, number]; value: Uint8Array };
  heads: { key: number; value: { tag: string; shape: number[]; dtype: string } };
}

type Name = "blobs" | "chunks" | "job" | "checkpoint" | "outbox" | "carries" | "facts" | "history" | "records" | "heads";
export type Database = IDBPDatabase<Schema>;
type Writing = IDBPTransaction<Schema, Name[], "readwrite">;

const VERSION = 1;
const ONE = 1;

export class Store {
  private openJob: Job | null = null;
  private waiting = new Map<number, Omit<Outgoing, "data">>();
  private left = new Map<number, Omit<CarryRow, "data">>();
  private past_ = new Map<string, PastRound & { at: number }>();
  private known = new Map<string, unknown>();
  private last = 0;

  private constructor(readonly db: Database, private readonly historyRounds: number) {}

  /** The store of one device in one federation. StoreError where the browser refuses one. */
  static async open(federation: string, device: string, historyRounds: number): Promise<Store> {
    try {
      const db = await openDB<Schema>(`edgefl:${federation}:${device}`, VERSION, {
        upgrade(made) {
          for (const name of ["blobs", "chunks", "job", "checkpoint", "facts", "history", "records", "heads"] as const) {
            made.createObjectStore(name);
          }
          for (const name of ["outbox", "carries"] as const) made.createObjectStore(name, { autoIncrement: true });
        },
      });
      const store = new Store(db, historyRounds);
      await store.remember();
      return store;
    } catch (error) {
      throw noStore(error);
    }
  }

  private async remember(): Promise<void> {
    const db = this.db;
    this.openJob = (await db.get("job", ONE)) ?? null;
    for (let cursor = await db.transaction("outbox").store.openCursor(); cursor; cursor = await cursor.continue()) {
      this.waiting.set(cursor.key, without(cursor.value));
    }
    for (let cursor = await db.transaction("carries").store.openCursor(); cursor; cursor = await cursor.continue()) {
      this.left.set(cursor.key, without(cursor.value));
    }
    for (let cursor = await db.transaction("facts").store.openCursor(); cursor; cursor = await cursor.continue()) {
      this.known.set(cursor.key, cursor.value);
    }
    const rounds = (await db.getAll("history")).sort((one, other) => one.at - other.at);
    this.past_ = new Map(rounds.map((each) => [each.nonce, each]));
    this.last = rounds.at(-1)?.at ?? 0;
  }

  /** `durable`: on the disk before it is done. StoreError for a full disk. */
  async write(names: Name[], work: (writing: Writing) => void, durable = false): Promise<void> {
    try {
      const writing = this.db.transaction(names, "readwrite", { durability: durable ? "strict" : "relaxed" });
      writing.done.catch(() => undefined); // where it is aborted below, what is thrown says why
      try {
        work(writing);
      } catch (error) {
        writing.abort();
        throw error;
      }
      await writing.done;
    } catch (error) {
      throw new StoreError(`the store cannot be written (${String(error)}): free some space on this device`);
    }
  }

  // -- the open round --------------------------------------------------------------------------------------

  get job(): Job | null {
    return this.openJob;
  }

  /** Remember the round that is being worked on, before any work; `fresh` drops what was computed for it. */
  async keepJob(job: Job, fresh = false): Promise<void> {
    this.openJob = job;
    await this.write(["job", "checkpoint"], (writing) => {
      if (fresh) void writing.objectStore("checkpoint").clear();
      void writing.objectStore("job").put(job, ONE);
    });
  }

  async closeJob(): Promise<void> {
    this.openJob = null;
    await this.write(["job", "checkpoint"], endJob);
  }

  /** Replace the checkpoint, whole or not at all. */
  async saveCheckpoint(checkpoint: Checkpoint): Promise<void> {
    await this.write(["checkpoint"], (writing) => void writing.objectStore("checkpoint").put(checkpoint, ONE));
  }

  async checkpoint(nonce: string): Promise<Checkpoint | null> {
    const found = await this.db.get("checkpoint", ONE);
    return found?.nonce === nonce ? found : null;
  }

  // -- outbox ----------------------------------------------------------------------------------------------

  /** Move a computed update into the outbox and end its job, in one durable step: it is never lost. */
  async finishJob(outgoing: Outgoing, carry: Uint8Array | null, carryName: string): Promise<void> {
    const row = { name: carryName, nonce: outgoing.nonce, round: outgoing.round };
    let [place, kept]: [number, number] = [0, 0];
    await this.write(["outbox", "carries", "job", "checkpoint"], (writing) => {
      void writing.objectStore("outbox").add(outgoing).then((key) => (place = key), () => undefined);
      if (carry) void writing.objectStore("carries").add({ ...row, data: carry }).then((key) => (kept = key), () => undefined);
      endJob(writing);
    }, true);
    this.waiting.set(place, without(outgoing));
    if (carry) this.left.set(kept, row);
    this.openJob = null;
  }

  get hasOutgoing(): boolean {
    return this.waiting.size > 0;
  }

  /** The oldest update that waits. */
  async outgoing(): Promise<Outgoing | null> {
    const [place] = this.waiting.keys();
    return place === undefined ? null : ((await this.db.get("outbox", place)) ?? null);
  }

  /** Whether the update of this task was computed and waits for the server. */
  waits(nonce: string): boolean {
    return [...this.waiting.values()].some((each) => each.nonce === nonce);
  }

  /** The server has spoken: the update leaves the outbox, and its carry goes unless it was accepted. */
  async settle(past: PastRound): Promise<void> {
    const places = [...this.waiting].filter(([, each]) => each.nonce === past.nonce).map(([place]) => place);
    const void_ = past.outcome === "accepted" ? [] : [...this.left].filter(([, each]) => each.nonce === past.nonce);
    let enter: () => void = () => undefined;
    await this.write(["outbox", "carries", "history"], (writing) => {
      for (const place of places) void writing.objectStore("outbox").delete(place);
      for (const [place] of void_) void writing.objectStore("carries").delete(place);
      enter = this.entered(writing, past);
    });
    enter();
    places.forEach((place) => this.waiting.delete(place));
    void_.forEach(([place]) => this.left.delete(place));
  }

  /** The open job is not taken: it ends and enters the history, in one durable step. */
  async decline(past: PastRound): Promise<void> {
    let enter: () => void = () => undefined;
    await this.write(["history", "job", "checkpoint"], (writing) => {
      enter = this.entered(writing, past);
      endJob(writing);
    }, true);
    enter();
    this.openJob = null;
  }

  /** Written into the history, whose oldest rounds leave it. What is to be done once that is kept: until then nobody is told. */
  private entered(writing: Writing, past: PastRound): () => void {
    this.last = Math.max(this.last + 1, Date.now());
    const row = { ...past, at: this.last };
    const history = writing.objectStore("history");
    void history.put(row, past.nonce);
    const others = [...this.past_.keys()].filter((nonce) => nonce !== past.nonce);
    const gone = others.slice(0, Math.max(0, others.length + 1 - this.historyRounds));
    for (const nonce of gone) void history.delete(nonce);
    return () => {
      for (const nonce of [past.nonce, ...gone]) this.past_.delete(nonce);
      this.past_.set(past.nonce, row);
    };
  }

  // -- history, facts, carries -----------------------------------------------------------------------------

  past(nonce: string): PastRound | null {
    return this.past_.get(nonce) ?? null;
  }

  /** Past rounds, oldest first. */
  history(): PastRound[] {
    return [...this.past_.values()];
  }

  fact<T>(name: string): T | undefined {
    return this.known.get(name) as T | undefined;
  }

  async keepFact(name: string, value: unknown, durable = true): Promise<void> {
    this.known.set(name, value);
    await this.write(["facts"], (writing) => void writing.objectStore("facts").put(value, name), durable);
  }

  /** What rounds left for later ones, oldest first. */
  carries(): StoredCarry[] {
    return [...this.left].map(([id, row]) => ({ id, ...row, waits: this.waits(row.nonce) }));
  }

  /** The bytes of one; null if its update was rejected meanwhile. */
  async carry(carry: StoredCarry): Promise<Uint8Array | null> {
    return (await this.db.get("carries", carry.id))?.data ?? null;
  }

  async dropCarries(carries: readonly StoredCarry[]): Promise<void> {
    carries.forEach((each) => this.left.delete(each.id));
    await this.write(["carries"], (writing) => {
      for (const each of carries) void writing.objectStore("carries").delete(each.id);
    });
  }

  close(): void {
    this.db.close();
  }
}

/** What to say where the browser refuses to keep anything. */
export function noStore(error: unknown): StoreError {
  return new StoreError(`the browser gives this page no store (${String(error)}): allow it to keep data, and leave private windows`);
}

function endJob(writing: Writing): void {
  void writing.objectStore("job").clear();
  void writing.objectStore("checkpoint").clear();
}

function without<T extends { data: Uint8Array }>(row: T): Omit<T, "data"> {
  const { data: _data, ...rest } = row;
  return rest;
}

