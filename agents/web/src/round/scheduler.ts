/** Where a device's rounds are taken in: which one is to be worked on, and what becomes of it. One at a time. */
import type { Outbox } from "../link/outbox";
import { DECLINED, type Job, type PastRound } from "../store/rows";
import type { Store } from "../store/store";
import { takes } from "../wire/announced";
import { type BlobRef, sameRef } from "../wire/blobs";
import { DataError, RoundAborted, RoundDeclined, said, StoreError } from "../wire/errors";
import type { Decline, Round, Task } from "../wire/messages";
import type { Say } from "../link/status";
import { contentOf, following, isOpen, isReplaced, jobOf } from "./job";
import type { ProgressMessages } from "./progress";
import { dropAbandoned, type Tell } from "./resume";

/** Runs that are remembered as open: a federation has one after the other. */
const MOST_RUNS = 16;

export interface SchedulerParts {
  store: Store;
  outbox: Outbox;
  progress: ProgressMessages;
  format: string;
  retryPauseS: number;
  stopping: () => boolean;
  work: (job: Job) => Promise<void>;
  /** Reads an announcement whose offers are elsewhere. */
  read: (announced: Round) => Promise<Round>;
  send: (decline: Decline) => void;
  say: Say;
  dropped: Tell;
  /** Has the agent look around. */
  wake: () => void;
}

export class RoundScheduler {
  announced: Round | null = null;
  task: Task | null = null;
  private reading: BlobRef | null = null;
  /** The last page that was read, and the announcement with what it offers. */
  private page: [BlobRef, Round] | null = null;
  private job: Job | null = null;
  private working: Promise<void> | null = null;
  private readonly seenOpen: string[] = [];
  /** The process began with work of an earlier process that ended early. */
  private resumed = false;
  private readonly failed = new Map<string, number>();
  private toldFailure = "";
  private begun = "";

  constructor(private readonly parts: SchedulerParts) {}

  // -- what the server says ----------------------------------------------------------------------------------

  announce(announced: Round): void {
    if (this.announced === null) this.resumed = this.parts.store.hasOutgoing || this.parts.store.job !== null;
    this.announced = announced;
    if (announced.state === "open" && !this.seenOpen.includes(announced.run)) {
      this.seenOpen.push(announced.run);
      if (this.seenOpen.length > MOST_RUNS) this.seenOpen.shift();
    }
    this.dropAbandoned();
    this.remind();
  }

  assign(task: Task): void {
    this.task = task;
    this.remind();
  }

  /** The server speaks of a round: it may have lost what we sent. */
  private remind(): void {
    if (this.parts.store.hasOutgoing) this.parts.outbox.sendAgain();
    this.declare();
  }

  /** Say again what was declined of the open round: there is no acknowledgement of it. */
  declare(): void {
    const announced = this.announced;
    if (announced === null) return;
    const open = takes(announced);
    for (const past of this.parts.store.history()) {
      if (past.outcome === DECLINED && past.run === announced.run && open.includes(past.round)) this.sendDecline(past);
    }
  }

  // -- where it stands ---------------------------------------------------------------------------------------

  get busy(): boolean {
    return this.working !== null;
  }

  isIdle(): boolean {
    return this.working === null && this.parts.store.job === null && !this.parts.store.hasOutgoing;
  }

  /** Whether the job in hand is of no use any more. */
  isOver(): boolean {
    if (this.parts.stopping()) return true;
    const { job, announced } = this;
    if (this.reading !== null) {
      return announced?.state !== "open" || !sameRef(this.reading, announced.pages);
    }
    if (job === null || announced === null) return false;
    return !isOpen(job, announced) || isReplaced(job, this.task);
  }

  /** The number of the round that is open, where this process was given no task so far; else 0. */
  roundWithoutUs(): number {
    const idle = this.task === null && this.working === null;
    return idle && this.announced?.state === "open" ? this.announced.round : 0;
  }

  tookPart(): boolean {
    return this.parts.store.history().some((past) => past.run === this.announced?.run);
  }

  /** Whether the run that this device was part of is over, and nothing of it waits here. */
  isDone(): boolean {
    const announced = this.announced;
    if (announced?.state !== "done") return false;
    // The retained "done" of an earlier run must not send a device away before the next run begins.
    const ours = this.seenOpen.includes(announced.run) || (this.resumed && this.tookPart());
    return ours && !this.parts.store.hasOutgoing && this.working === null;
  }

  // -- working -----------------------------------------------------------------------------------------------

  /** Start the round that is open and ours, unless it is done, failed a moment ago, or already running. */
  begin(): void {
    if (this.working !== null || this.announced === null) return;
    const whole = this.whole(this.announced);
    if (whole === null) return this.beginPage(this.announced);
    const next = this.nextJob(whole);
    if (next === null || performance.now() < (this.failed.get(next.job.nonce) ?? 0)) return;
    this.job = next.job;
    this.start(next.save().then(() => this.attempt(next.job)));
  }

  /** Ends when no work is left. */
  async idle(): Promise<void> {
    await this.working;
  }

  private start(work: Promise<void>): void {
    this.working = work
      .catch((error: unknown) => this.parts.say("store", said(error)))
      .finally(() => {
        this.working = null;
        this.job = null;
        this.dropAbandoned(); // its last step may have been made after its round was over
        this.parts.wake();
      });
  }

  /** With all that it offers; null while that is to be read. */
  private whole(announced: Round): Round | null {
    if (announced.pages === null) return announced;
    if (this.page === null || !sameRef(this.page[0], announced.pages)) return null;
    const read = this.page[1];
    return { ...announced, offers: read.offers, units: read.units, live: read.live, pages: null };
  }

  private beginPage(announced: Round): void {
    const page = announced.pages!;
    if (performance.now() < (this.failed.get(page.sha256) ?? 0) || !this.takesPart(announced)) return;
    this.reading = page;
    this.start(this.attemptPage(page, announced));
  }

  private takesPart(announced: Round): boolean {
    const { store } = this.parts;
    const { job } = store;
    if (job !== null && isOpen(job, announced) && !isReplaced(job, this.task)) return true;
    if (job !== null) void store.closeJob().catch(() => undefined);
    const task = this.task;
    if (task === null || task.run !== announced.run || !takes(announced).includes(task.round)) return false;
    return !store.waits(task.nonce) && store.past(task.nonce) === null;
  }

  private async attemptPage(page: BlobRef, announced: Round): Promise<void> {
    try {
      this.page = [page, await this.parts.read(announced)];
    } catch (error) {
      if (!(error instanceof RoundAborted)) this.fail(page.sha256, announced.round, this.task?.tier ?? "", error);
    } finally {
      this.reading = null;
    }
  }

  /** What is to be done now, and how it is kept before. */
  private nextJob(announced: Round): { job: Job; save: () => Promise<void> } | null {
    const { store, format } = this.parts;
    const kept = store.job;
    if (kept !== null) {
      const now = following(kept, announced, format);
      if (now !== null && !isReplaced(kept, this.task)) return this.tried(now, { fresh: contentOf(now) !== contentOf(kept) });
      void store.closeJob().catch(() => undefined);
    }
    const job = this.task && jobOf(this.task, announced, format);
    if (job === null || store.waits(job.nonce) || store.past(job.nonce) !== null) return null;
    return this.tried(job, { isNew: true });
  }

  /** The first attempt of each process counts: one that ends the process is not made for ever. */
  private tried(job: Job, { fresh = false, isNew = false }): { job: Job; save: () => Promise<void> } {
    const first = isNew || job.nonce !== this.begun;
    const kept = first ? { ...job, tries: job.tries + 1 } : job;
    return {
      job: kept,
      save: async () => {
        await this.parts.store.keepJob(kept, fresh);
        this.begun = job.nonce;
      },
    };
  }

  /** One round, from the first blob to the outbox. */
  private async attempt(job: Job): Promise<void> {
    try {
      await this.parts.work(job);
      this.parts.outbox.wake();
    } catch (error) {
      await this.ended(job, error);
    }
  }

  private async ended(job: Job, error: unknown): Promise<void> {
    const { say, store } = this.parts;
    if (error instanceof RoundAborted && this.parts.stopping()) {
      await store.keepJob({ ...job, tries: job.tries - 1 }).catch(() => undefined); // it ended in good order
      const text = `round ${job.round} is left as it is: this device goes on with it when it is started again`;
      say("stopped", text, { round: job.round });
    } else if (error instanceof RoundAborted) say("aborted", error.message, { round: job.round });
    else if (error instanceof RoundDeclined) await this.decline(job, error);
    else if (error instanceof DataError) {
      say("data", error.message, { round: job.round });
      await this.decline(job, new RoundDeclined("wrong-data", error.message)); // another round may fit
    } else this.fail(job.nonce, job.round, job.tier, error);
  }

  /** Remembered before it is sent: it is sent again until its round is over, and never worked on again. */
  private async decline(job: Job, declined: RoundDeclined): Promise<void> {
    const past: PastRound = {
      run: job.run, round: job.round, tier: job.tier, nonce: job.nonce, outcome: DECLINED, reason: declined.reason,
      text: declined.message, loss: NaN,
    };
    try {
      await this.parts.store.decline(past);
    } catch (error) {
      if (!(error instanceof StoreError)) throw error;
      return this.fail(job.nonce, job.round, job.tier, error);
    }
    this.sendDecline(past);
    this.parts.say("declined", `round ${job.round} (${declined.reason}): ${declined.message}`, { round: job.round, reason: declined.reason });
  }

  private sendDecline(past: PastRound): void {
    this.parts.send({ v: 1, round: past.round, nonce: past.nonce, reason: past.reason, text: "" });
  }

  private dropAbandoned(): void {
    const { store, dropped } = this.parts;
    // Where the disk is full, the next announcement finds it again.
    if (this.announced) void dropAbandoned(store, this.announced, dropped).catch(() => undefined);
  }

  /** An attempt at what `key` names, of round `number`. */
  private fail(key: string, number: number, tier: string, error: unknown): void {
    const reason = said(error);
    this.failed.set(key, performance.now() + 1000 * this.parts.retryPauseS);
    this.parts.progress.failed(number, tier, error);
    if (`${key} ${reason}` === this.toldFailure) return; // it tries every second, and people have read it
    this.toldFailure = `${key} ${reason}`;
    this.parts.say("failed", `round ${number} failed: ${reason}; trying again while it is open`, { round: number });
  }
}
