/** What a device tells of a round while it works on it: for people who watch, and nothing depends on it. */
import type { Fetcher } from "../link/fetch";
import type { Session } from "../link/session";
import type { Job } from "../store/rows";
import type { MessageSigner } from "../wire/envelope";
import { failureCode } from "../wire/errors";
import { Progress } from "../wire/messages";
import type { Topics } from "../wire/topics";
import type { ProgressEvent } from "../worker/messages";
import type { Step } from "./control";

const PERIOD_MS = 200;

export class ProgressMessages {
  private last = 0;
  private toldPage = 0;

  constructor(
    private readonly session: Pick<Session, "publish" | "connected">,
    private readonly topics: Topics,
    private readonly fetcher: Pick<Fetcher, "receivedBytes">,
    private readonly speaker: MessageSigner,
    private readonly peakBytes: () => number,
    private readonly sentBytes: () => number,
    private readonly post: (event: ProgressEvent) => void,
  ) {}

  /** A step was made. The last one of a stage is told, unless the server wants to hear less. */
  watch(job: Job, step: Step): void {
    const now = performance.now();
    const isLast = step.step >= step.steps;
    const message = this.messageOf(job.round, job.tier, step);
    if (isLast || now - this.toldPage >= PERIOD_MS) {
      this.toldPage = now;
      this.post(eventOf(message, this.sentBytes()));
    }
    const paceMs = 1000 * job.progress_s;
    if (now - this.last < Math.max(PERIOD_MS, paceMs) && (!isLast || paceMs > PERIOD_MS)) return;
    this.last = now;
    this.publish(message);
  }

  /** An attempt ended; there will be another while the round is open. */
  failed(round: number, tier: string, error: unknown): void {
    const step = { stage: `failed: ${failureCode(error)}`, step: 0, steps: 0, loss: NaN, stepMs: 0 };
    const message = this.messageOf(round, tier, step);
    this.post(eventOf(message, this.sentBytes()));
    this.publish(message);
  }

  private messageOf(round: number, tier: string, step: Step): Progress {
    return {
      v: 1, round, tier, stage: step.stage, step: step.step, steps: step.steps, loss: step.loss, step_ms: step.stepMs,
      peak_bytes: this.peakBytes(), down_bytes: this.fetcher.receivedBytes, up_bytes: 0,
    };
  }

  private publish(message: Progress): void {
    if (!this.session.connected) return;
    void this.session.publish(this.topics.progress, this.speaker.seal(this.topics.progress, Progress, message), { qos: 0 });
  }
}

function eventOf(message: Progress, upBytes: number): ProgressEvent {
  return {
    type: "progress", round: message.round, tier: message.tier, stage: message.stage, step: message.step, steps: message.steps,
    loss: message.loss, stepMs: message.step_ms, peakBytes: message.peak_bytes, downBytes: message.down_bytes, upBytes,
  };
}
