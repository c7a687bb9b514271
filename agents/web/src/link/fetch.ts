/** Fetching blobs: subscribe to the chunks that are missing, a window at a time, check each, keep it. */
import type { BlobStore } from "../store/blobs";
import { accepts, type BlobRef, checkRef, verified } from "../wire/blobs";
import { unpacked } from "../wire/compression";
import { BundleError, LOST_CHUNK, RoundAborted, RoundDeclined } from "../wire/errors";
import type { Limits } from "../wire/limits";
import { publishBytes, type Topics } from "../wire/topics";
import { Mailbox } from "./mailbox";
import type { Mirrors } from "./mirrors";
import type { Session } from "./session";
import { readableBytes } from "./watch";

/** Windows of chunks that may wait to be looked at: some are sent twice. */
const WINDOWS = 4;
const LOOK_MS = 250;

type Chunk = [ref: BlobRef, index: number];
type Arrived = { topic: string; payload: Uint8Array } | "poke";

interface Window {
  waiting: Chunk[];
  asked: Map<string, Chunk>;
  bad: Map<string, number>;
  finished: string[];
}

export class Fetcher {
  private readonly arrived: Mailbox<Arrived>;
  private largest = -1;
  /** Payloads, and whole packets, of all messages on blob topics since they were last taken. */
  private received = { payload: 0, wire: 0 };

  constructor(
    private readonly session: Pick<Session, "connected" | "subscribe" | "unsubscribe">,
    private readonly topics: Topics,
    private readonly store: BlobStore,
    private readonly limits: Limits,
    private readonly aborted: () => boolean,
    readonly mirrors: Mirrors,
  ) {
    this.arrived = new Mailbox(WINDOWS * limits.fetch_window);
  }

  get receivedBytes(): number {
    return this.received.payload;
  }

  takeReceived(): { payload: number; wire: number } {
    const taken = this.received;
    this.received = { payload: 0, wire: 0 };
    return taken;
  }

  /** A message on a blob topic arrived. */
  deliver(topic: string, payload: Uint8Array): void {
    this.received.payload += payload.length;
    this.received.wire += publishBytes(topic, payload.length, 0);
    if (payload.length <= this.largest) this.arrived.put({ topic, payload });
  }

  /** The connection came back: what was asked for must be asked for again. */
  poke(): void {
    this.arrived.put("poke");
  }

  /** The blob's own bytes, whole and checked. */
  async get(ref: BlobRef): Promise<Uint8Array> {
    await this.bring([ref]);
    return this.read(ref, [ref]);
  }

  /** Have all of `refs` here: one request for all of it. */
  async bring(refs: readonly BlobRef[]): Promise<void> {
    for (const ref of refs) checkRef(ref, this.limits.max_blob_bytes);
    const once = [...new Map(refs.map((ref) => [ref.sha256, ref])).values()];
    if (!(await this.missing(once)).length) return;
    await this.store.makeRoom(once);
    await this.mirrors.bring(once, this.store, this.aborted);
    const missing = await this.missing(once);
    if (!missing.length) return;
    this.mirrors.checkBroker();
    for (const [ref] of missing) this.checkChunks(ref);
    await this.collect({ waiting: missing, asked: new Map(), bad: new Map(), finished: [] });
  }

  /** RoundDeclined if a message of the broker with a chunk of `ref` would end the connection. */
  private checkChunks(ref: BlobRef): void {
    const most = readableBytes(this.limits);
    const largest = Math.min(ref.chunk, ref.size);
    if (largest <= most) return;
    throw new RoundDeclined(
      "large-chunks",
      `expected chunks of ${most} bytes at most (limits.max_message_bytes), found ${largest} in blob ` +
        `${ref.sha256.slice(0, 12)}; set limits.chunk_bytes of the federation lower`,
    );
  }

  private async missing(refs: readonly BlobRef[]): Promise<Chunk[]> {
    const found: Chunk[] = [];
    for (const ref of refs) for (const index of await this.store.missing(ref)) found.push([ref, index]);
    return found;
  }

  /** One of those that were brought here; where it has to be fetched again, those `beside` it stay. */
  async read(ref: BlobRef, beside: readonly BlobRef[]): Promise<Uint8Array> {
    for (let attempt = 0; attempt < this.limits.fetch_retries; attempt++) {
      try {
        const data = await verified(ref, await this.store.get(ref));
        return unpacked(ref, data);
      } catch (error) {
        if (!(error instanceof BundleError) || !error.message.includes("damaged")) throw error;
        await this.store.drop(ref.sha256);
        await this.bring([...beside, ref]);
      }
    }
    throw new BundleError(`blob ${ref.sha256.slice(0, 12)} is damaged on every attempt; it is refused`);
  }

  private async collect(window: Window): Promise<void> {
    this.arrived.drain();
    this.largest = window.waiting.reduce((most, [ref]) => Math.max(most, ref.chunk), 0);
    let silences = 0;
    let deadline = this.patience();
    try {
      while (window.waiting.length || window.asked.size) {
        this.ask(window);
        const arrived = await this.next(deadline);
        if (typeof arrived === "object") {
          if (await this.take(window, arrived.topic, arrived.payload)) [silences, deadline] = [0, this.patience()];
          continue;
        }
        deadline = this.patience();
        this.session.subscribe([...window.asked.keys()], 0, false);
        if (arrived === undefined && this.session.connected) silences++;
        if (silences > this.limits.fetch_retries) throw this.lost(window, silences);
      }
    } finally {
      this.largest = -1;
      this.session.unsubscribe([...window.asked.keys(), ...window.finished]);
    }
  }

  private lost(window: Window, silences: number): BundleError {
    const [ref, index] = [...window.asked.values()][0]!;
    return new BundleError(
      `${LOST_CHUNK}: chunk ${index} of blob ${ref.sha256.slice(0, 12)} did not arrive in ${silences} attempts of ` +
        `${this.limits.fetch_timeout_s} s; is the server up?`,
    );
  }

  /** Fill the window once half of it is free; leave the topics that are done. */
  private ask(window: Window): void {
    if (window.asked.size > this.limits.fetch_window / 2 || !window.waiting.length) return;
    const fresh: string[] = [];
    while (window.waiting.length && window.asked.size < this.limits.fetch_window) {
      const chunk = window.waiting.shift()!;
      const topic = this.topics.blobChunk(chunk[0].sha256, chunk[1]);
      window.asked.set(topic, chunk);
      fresh.push(topic);
    }
    this.session.unsubscribe(window.finished);
    window.finished = [];
    this.session.subscribe(fresh, 0, false);
  }

  /** Whether the message answers what was asked for, well or badly; anything else is as good as silence. */
  private async take(window: Window, topic: string, payload: Uint8Array): Promise<boolean> {
    const chunk = window.asked.get(topic);
    if (chunk === undefined || !payload.length) return false;
    const [ref, index] = chunk;
    if (!(await accepts(ref, index, payload))) {
      this.refuse(window, topic, ref, index);
      return true;
    }
    await this.store.put(ref, index, payload);
    window.asked.delete(topic);
    window.finished.push(topic);
    return true;
  }

  private refuse(window: Window, topic: string, ref: BlobRef, index: number): void {
    const times = (window.bad.get(topic) ?? 0) + 1;
    window.bad.set(topic, times);
    if (times >= this.limits.fetch_retries) {
      throw new BundleError(
        `${LOST_CHUNK}: chunk ${index} of blob ${ref.sha256.slice(0, 12)} had a wrong digest ${times} times; it is refused`,
      );
    }
    this.session.unsubscribe([topic]);
    this.session.subscribe([topic], 0, false);
  }

  private patience(): number {
    return performance.now() + 1000 * this.limits.fetch_timeout_s;
  }

  /** The next message or poke; undefined for silence. RoundAborted when the round is over. */
  private async next(deadline: number): Promise<Arrived | undefined> {
    for (;;) {
      if (this.aborted()) throw new RoundAborted("the round ended while its blobs were fetched");
      const left = deadline - performance.now();
      if (left <= 0) return undefined;
      const arrived = await this.arrived.get(Math.min(left, LOOK_MS));
      if (this.aborted()) throw new RoundAborted("the round ended while its blobs were fetched");
      if (arrived !== undefined) return arrived;
    }
  }
}

