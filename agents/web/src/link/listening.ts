/** Whether a device hears where the run is. One that gets no task for a while stops listening until it is called. */
import type { Round } from "../wire/messages";
import type { Session } from "./session";

/** Rounds without a task that a device listens to: by then it knows what became of its last one. */
const ROUNDS = 2;

export class Listening {
  private readonly rounds = new Set<string>();
  private resting = false;

  constructor(
    private readonly session: Pick<Session, "subscribe" | "unsubscribe">,
    private readonly topic: string,
    private readonly idle: () => boolean,
  ) {}

  /** Listen: the connection is new, or there is a task. The broker says what it retains. */
  begin(): void {
    this.rounds.clear();
    if (!this.resting) return;
    this.resting = false;
    this.session.subscribe([this.topic], 1, true);
  }

  /** An announcement came; one of many rounds without a task is the last one for a while. */
  heard(announced: Round): void {
    if (announced.state === "done") return;
    if (announced.state === "open") this.rounds.add(`${announced.run}/${announced.round}`);
    if (this.rounds.size > ROUNDS && this.idle()) {
      this.resting = true;
      this.session.unsubscribe([this.topic]);
    }
  }
}
