/** What a device tells people of its place at the broker. Each thing is said once for as long as it stays true. */
import type { Ack, Round } from "../wire/messages";
import type { AgentEvent, EventName } from "../worker/messages";
import type { Event } from "./session";

export type Say = (event: EventName, text: string, details?: AgentEvent["details"]) => void;

export class StatusReporter {
  private answer = "";
  private readonly denials = new Set<string>();
  private over = "";
  private aloneSince: number | null = null;
  private patienceS: number;
  private leftOutSince: number | null = null;
  private toldLeftOut = false;

  constructor(
    private readonly federation: string,
    private readonly device: string,
    private readonly broker: string,
    private readonly noticeS: number,
    private readonly say: Say,
  ) {
    this.patienceS = noticeS;
  }

  offline(event: Event & { kind: "down" }): void {
    const again = `trying again in ${event.retryS.toFixed(1)} s`;
    if (!event.rival) return this.say("offline", `${event.reason}; ${again}`);
    this.say(
      "rival",
      `another client takes the place of this one at ${this.broker} again and again: most likely a second device of ` +
        `federation '${this.federation}' runs as '${this.device}' too; give each its own name; ${again}`,
    );
  }

  /** The broker will not let this device read or write a topic; of blobs, which are many, the first is told. */
  denied(event: Event & { kind: "refused" }): void {
    const kind = `${event.action} ${event.topic.split("/blobs/")[0]}`;
    if (this.denials.has(kind)) return;
    this.denials.add(kind);
    const text = `the broker at ${this.broker} does not let this device ${event.action} ${event.topic}: ${event.reason}`;
    this.say("denied", text, { topic: event.topic, reason: event.reason });
  }

  /** The server's word on the hello, or on a message that it cannot read. */
  answered(ack: Ack): void {
    if (ack.text === this.answer) return; // a server that was started again answers the same hello
    this.answer = ack.text;
    const refused = ack.reason === "malformed" || ack.reason === "come-later";
    this.say(refused ? "refused" : "tier", ack.text, { reason: ack.reason });
  }

  announced(round: Round): void {
    if (round.state !== "done" || round.run === this.over) return;
    this.over = round.run;
    this.say("done", `the training of federation '${this.federation}' is over`, { run: round.run });
  }

  /** To be called now and then; `alone`: the broker is there, and nothing was heard of the federation. */
  step(alone: boolean, roundWithoutUs: number, tookPart: () => boolean): void {
    const now = performance.now();
    if (!alone) this.aloneSince = null;
    else if (now - (this.aloneSince ??= now) > 1000 * this.patienceS) {
      this.aloneSince = now;
      this.patienceS *= 2;
      this.say(
        "alone",
        `nothing is heard of federation '${this.federation}' at ${this.broker}: this device waits for its server; is that ` +
          "its name?",
      );
    }
    if (!roundWithoutUs) this.leftOutSince = null;
    else if (!this.toldLeftOut && now - (this.leftOutSince ??= now) > 1000 * this.noticeS) {
      this.toldLeftOut = true;
      if (tookPart()) return;
      this.say(
        "left-out",
        `round ${roundWithoutUs} began without this device, which gets a task in a later round. If it gets none, the server ` +
          "does not hear it: a broker with access rules has to let it write below its own topics",
        { round: roundWithoutUs },
      );
    }
  }
}
