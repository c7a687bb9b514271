/** What the agent decides for a round. */
import { RoundAborted, RoundDeclined } from "../wire/errors";
import type { Limits } from "../wire/limits";

/** Where a round stands, for people who watch. */
export interface Step {
  stage: string;
  step: number;
  steps: number;
  loss: number;
  stepMs: number;
}

export interface TrainerSettings {
  checkpointSteps: number;
  watch(step: Step): void;
  /** Between two steps: lets messages in; RoundAborted if the round is over, RoundDeclined if it is to end here. */
  between(): Promise<void>;
  /** A step took so many milliseconds. */
  worked(ms: number): void;
  /** Room for so many bytes beside the blobs; RoundDeclined where there never is. */
  room(bytes: number): Promise<void>;
}

/** Lets the events that wait be handled: a timer would wait four milliseconds. */
export function otherTasks(): Promise<void> {
  return new Promise((resolve) => {
    const channel = new MessageChannel();
    channel.port1.onmessage = () => {
      channel.port1.close();
      resolve();
    };
    channel.port2.postMessage(null);
  });
}

/** Between the steps of one round: whether it goes on. `open` waits while the device is paused. */
export class RoundControl {
  private readonly began = performance.now();
  private workedMs = 0;

  constructor(
    private readonly limits: Limits,
    private readonly aborted: () => boolean,
    private readonly open: () => Promise<void>,
  ) {}

  worked(ms: number): void {
    this.workedMs = ms;
  }

  async between(): Promise<void> {
    await otherTasks();
    if (!this.aborted()) await this.open();
    if (this.aborted()) throw new RoundAborted("the round ended before this device was done");
    const tookS = this.workedMs / 1000;
    const roundS = (performance.now() - this.began) / 1000;
    this.workedMs = 0;
    if (tookS > this.limits.max_step_s) throw tooLong(`a step took ${tookS.toFixed(0)} s`, `limits.max_step_s is ${this.limits.max_step_s}`);
    if (roundS > this.limits.max_round_s) throw tooLong(`the round took ${roundS.toFixed(0)} s`, `limits.max_round_s is ${this.limits.max_round_s}`);
  }
}

function tooLong(what: string, limit: string): RoundDeclined {
  return new RoundDeclined(
    "too-much-work",
    `${what}, and ${limit} here: raise it, or give this device a smaller tier or fewer steps`,
  );
}
