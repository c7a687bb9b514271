/**
 * Blobs by mirrors, before the broker is asked. A mirror is believed nothing: each chunk is held against its digest as it
 * comes, and what is right stays. A browser asks only those that allow it (CORS), as `edgefl mirror` does.
 */
import type { BlobStore } from "../store/blobs";
import { accepts, type BlobRef } from "../wire/blobs";
import { BundleError, LOST_CHUNK, RoundAborted, said } from "../wire/errors";
import type { Limits } from "../wire/limits";
import type { Round } from "../wire/messages";
import { MOST_MIRRORS, parseMirror } from "../wire/mirrors";

const MOST_DOUBLINGS = 6;
const MOST_FAILED = 2;
/** Blobs in a row that a mirror has not, until it is left like one that fails. */
const MOST_LACKS = 3;

/** How a mirror did lately. */
interface MirrorRecord {
  faults: number;
  leftUntil: number;
  told: string;
}

class BlobMissing extends Error {}

export class Mirrors {
  private named: string[] = [];
  private only = false;
  private readonly standings = new Map<string, MirrorRecord>();
  private received = 0;

  constructor(
    private readonly limits: Limits,
    private readonly tell: (text: string) => void,
    private readonly get: typeof fetch = (...request) => globalThis.fetch(...request),
  ) {}

  /** Where the blobs of the current round are. */
  announced(round: Round): void {
    const named = new Set<string>();
    for (const text of round.mirrors.slice(0, MOST_MIRRORS)) {
      try {
        named.add(parseMirror(text));
      } catch (error) {
        this.tell(`the server names a mirror that is none: ${said(error)}`);
      }
    }
    this.named = [...named];
    this.only = round.mirrors_only;
  }

  /** Bytes of chunks that came by mirrors since this was last asked. */
  takeReceived(): number {
    const taken = this.received;
    this.received = 0;
    return taken;
  }

  /** Have as many chunks of `refs` in the store as mirrors give. Where there is a broker, two that fail are enough. */
  async bring(refs: readonly BlobRef[], store: BlobStore, aborted: () => boolean): Promise<void> {
    let failed = 0;
    for (const mirror of this.named) {
      if ((this.standings.get(mirror)?.leftUntil ?? 0) > performance.now()) continue;
      const wanted: BlobRef[] = [];
      for (const ref of refs) if ((await store.missing(ref)).length) wanted.push(ref);
      if (!wanted.length || (failed === MOST_FAILED && !this.only)) return;
      if (!(await this.ask(mirror, wanted, store, aborted))) failed++;
    }
  }

  /** To be called where something is missing still; BundleError if it lies at mirrors only. */
  checkBroker(): void {
    if (!this.only) return;
    const faults = this.named.map((mirror) => `${mirror}: ${this.standings.get(mirror)?.told || "left for a while"}`);
    throw new BundleError(`${LOST_CHUNK}: no mirror gave all blobs of the round, and the broker has none: ${faults.join("; ")}`);
  }

  /** Whether the mirror did not fail. */
  private async ask(mirror: string, refs: readonly BlobRef[], store: BlobStore, aborted: () => boolean): Promise<boolean> {
    let lacks = 0;
    for (const ref of refs) {
      try {
        for (const [first, last] of runsOf(await store.missing(ref))) await this.stretch(mirror, ref, first, last, store, aborted);
        this.standings.delete(mirror);
        lacks = 0;
      } catch (error) {
        if (error instanceof RoundAborted || aborted()) throw new RoundAborted("the round ended while its blobs were fetched");
        if (error instanceof BlobMissing && ++lacks < MOST_LACKS) continue;
        this.leave(mirror, `blob ${ref.sha256.slice(0, 12)}: ${said(error)}`);
        return false;
      }
    }
    return true;
  }

  /** Chunks `first` to `last` (not included) of a blob. */
  private async stretch(mirror: string, ref: BlobRef, first: number, last: number, store: BlobStore, aborted: () => boolean): Promise<void> {
    const [start, stop] = [first * ref.chunk, Math.min(last * ref.chunk, ref.size)];
    const patience = new MinimumRate(1000 * this.limits.fetch_timeout_s, this.only ? 0 : this.limits.mirror_bytes_s);
    try {
      const answer = await this.get(`${mirror}/${ref.sha256}`, {
        headers: { Range: `bytes=${start}-${stop - 1}` }, redirect: "error", credentials: "omit", cache: "no-store",
        referrerPolicy: "no-referrer", signal: patience.signal,
      });
      if (answer.status === 404 || answer.status === 410) throw new BlobMissing("it has not this blob");
      if (answer.status !== 200 && answer.status !== 206) throw new Error(`it answers ${answer.status}`);
      let skip = answer.status === 200 ? start : 0;
      let [index, held] = [first, new Uint8Array(Math.min(ref.chunk, ref.size - start))];
      let filled = 0;
      for (const reader = answer.body!.getReader(); index < last;) {
        const { value, done } = await reader.read();
        if (aborted()) throw new RoundAborted("the round ended while its blobs were fetched");
        if (done || value === undefined) throw new Error("it ends too early");
        let part = value.subarray(Math.min(skip, value.length));
        skip -= value.length - part.length;
        while (part.length && index < last) {
          const taken = part.subarray(0, held.length - filled);
          held.set(taken, filled);
          filled += taken.length;
          part = part.subarray(taken.length);
          if (filled < held.length) break;
          this.received += filled;
          if (!(await accepts(ref, index, held))) throw new Error(`chunk ${index} has a wrong digest`);
          await store.put(ref, index, held);
          patience.came(filled);
          index++;
          [held, filled] = [new Uint8Array(Math.max(0, Math.min(ref.chunk, ref.size - index * ref.chunk))), 0];
        }
      }
    } finally {
      patience.end();
    }
  }

  private leave(mirror: string, why: string): void {
    const before = this.standings.get(mirror) ?? { faults: 0, leftUntil: 0, told: "" };
    // Where there is no broker to turn to, it is tried again soon.
    const pauseS = this.limits.mirror_pause_s * 2 ** (this.only ? 0 : Math.min(before.faults, MOST_DOUBLINGS));
    this.standings.set(mirror, { faults: before.faults + 1, leftUntil: performance.now() + 1000 * pauseS, told: why });
    if (why !== before.told) this.tell(`mirror ${mirror} is left for ${pauseS} s: ${why}`);
  }
}

/** Ends a request whose next chunk does not come, or that gives too little. */
class MinimumRate {
  private readonly control = new AbortController();
  private timer: ReturnType<typeof setTimeout>;
  private began = performance.now();
  private bytes = 0;
  readonly signal = this.control.signal;

  constructor(private readonly ms: number, private readonly leastPerS: number) {
    this.timer = setTimeout(() => this.lost(), ms);
  }

  /** A chunk came; Error once there were too few bytes. */
  came(bytes: number): void {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.lost(), this.ms);
    this.bytes += bytes;
    const tookMs = performance.now() - this.began;
    if (tookMs < this.ms) return;
    if (this.bytes < (this.leastPerS * tookMs) / 1000) throw new Error(`it gave ${this.bytes} bytes in ${Math.round(tookMs)} ms`);
    [this.bytes, this.began] = [0, performance.now()];
  }

  end(): void {
    clearTimeout(this.timer);
    this.control.abort();
  }

  private lost(): void {
    this.control.abort(new Error(`nothing came for ${this.ms / 1000} s`));
  }
}

/** Stretches of neighbours in ascending numbers: the first of each, and the one after its last. */
function runsOf(indices: readonly number[]): [number, number][] {
  const runs: [number, number][] = [];
  for (const index of indices) {
    const last = runs.at(-1);
    if (last?.[1] === index) last[1]++;
    else runs.push([index, index + 1]);
  }
  return runs;
}
