/** The durable outbox: an update is sent, and sent again, until the server has spoken on it. */
import type { Outgoing, PastRound } from "../store/rows";
import type { Store } from "../store/store";
import { split } from "../wire/blobs";
import { hexDigest } from "../wire/digests";
import type { MessageSigner } from "../wire/envelope";
import { ProtocolError, said } from "../wire/errors";
import type { Limits } from "../wire/limits";
import { type Ack, read, Update, UpdateChunk } from "../wire/messages";
import type { Topics } from "../wire/topics";
import { Mailbox, pause } from "./mailbox";
import type { Session } from "./session";

/** More than any UpdateChunk needs around its data. */
const ENVELOPE_BYTES = 512;
const MOST_ACKS = 64;
/** Times `ack_timeout_s` that an update waits at most; a reason to send it again ends any wait. */
const LONGEST = 16;

/** What a device remembers of an update that the server accepted or refused. */
export function pastOf(outgoing: Outgoing, ack: Ack): PastRound {
  const past = { run: outgoing.run, round: outgoing.round, nonce: outgoing.nonce, tier: "", outcome: ack.status, reason: ack.reason, text: ack.text, loss: NaN };
  try {
    const update = read(Update, outgoing.data);
    return { ...past, tier: update.tier, loss: update.metrics["loss"] ?? NaN };
  } catch (error) {
    if (error instanceof ProtocolError) return past; // another release computed it
    throw error;
  }
}

type Word = Ack | "again";

export class Outbox {
  private readonly acks = new Mailbox<Word>(MOST_ACKS);
  private sending = "";
  private stopping = false;
  private trouble = "";
  private wakeUp: () => void = () => undefined;
  sentBytes = 0;

  constructor(
    private readonly session: Pick<Session, "connected" | "publish" | "window">,
    private readonly topics: Topics,
    private readonly store: Store,
    private readonly limits: Limits,
    private readonly speaker: MessageSigner,
    private readonly settled: (outgoing: Outgoing, ack: Ack) => Promise<void>,
    private readonly troubled: (text: string) => void,
  ) {}

  async run(): Promise<void> {
    while (!this.stopping) {
      let sent = false;
      try {
        const outgoing = this.session.connected ? await this.store.outgoing() : null;
        if (outgoing) {
          this.sending = outgoing.nonce;
          await this.sendUntilSettled(outgoing);
          sent = true;
          this.trouble = "";
        }
      } catch (error) {
        if (said(error) !== this.trouble) this.troubled((this.trouble = said(error)));
        await pause(1000 * this.limits.retry_pause_s);
      }
      this.sending = "";
      if (this.stopping || sent) continue; // there may be another
      await Promise.race([pause(1000), new Promise<void>((resolve) => (this.wakeUp = resolve))]);
    }
  }

  stop(): void {
    this.stopping = true;
    this.sendAgain();
  }

  /** There is something to send. */
  wake(): void {
    this.wakeUp();
  }

  /** There is a reason to send what waits once more: what was sent may be lost. */
  sendAgain(): void {
    this.acks.put("again");
    this.wakeUp();
  }

  /** The server's word arrived. One on another update than the one that is being sent says nothing. */
  deliver(ack: Ack): void {
    if (this.sending === "" || this.sending === ack.nonce) this.acks.put(ack);
  }

  private async sendUntilSettled(outgoing: Outgoing): Promise<void> {
    const room = Math.max(Math.floor(this.limits.chunk_bytes / 2), this.limits.chunk_bytes - ENVELOPE_BYTES);
    const pieces = split(outgoing.data, room);
    const sha256 = await hexDigest(outgoing.data);
    const every = pieces.map((_, index) => index);
    const first = outgoing.ask && pieces.length > 1 ? null : every;
    let wanted = first;
    let patienceS = this.limits.ack_timeout_s;
    while (!this.stopping && this.session.connected) {
      this.forgetReasons();
      if (wanted === null) await this.send(outgoing, sha256, pieces, [0], true);
      else await this.send(outgoing, sha256, pieces, wanted, false);
      const ack = await this.waitFor(outgoing.nonce, sha256, patienceS);
      if (ack === null) {
        // A server with a backlog gets no shorter one by hearing everything twice.
        patienceS = Math.min(2 * patienceS, LONGEST * this.limits.ack_timeout_s);
        wanted = first;
      } else if (ack.status === "missing") {
        wanted = [...new Set(ack.missing)].filter((index) => index in pieces);
      } else {
        await this.settled(outgoing, ack);
        return;
      }
    }
  }

  /** Publish chunks, at most a window of them ahead of the broker; `offer`: only that there is an update. */
  private async send(outgoing: Outgoing, sha256: string, pieces: Uint8Array[], wanted: readonly number[], offer: boolean): Promise<void> {
    const flying: Promise<boolean>[] = [];
    const window = Math.max(1, Math.min(this.limits.upload_window, this.session.window));
    for (const index of wanted) {
      const data = offer ? new Uint8Array() : pieces[index]!;
      const chunk = { v: 1, nonce: outgoing.nonce, sha256, index, count: pieces.length, size: outgoing.data.length, data };
      const topic = this.topics.update(outgoing.round, index, outgoing.shard);
      const payload = this.speaker.seal(topic, UpdateChunk, chunk);
      this.sentBytes += payload.length;
      flying.push(this.session.publish(topic, payload));
      if (flying.length < window) continue;
      if (!(await flying.shift()) || this.stopping) return;
    }
  }

  /** The server's word on this update, not on another for the same task; null when it is time to send again. */
  private async waitFor(nonce: string, sha256: string, patienceS: number): Promise<Ack | null> {
    const deadline = performance.now() + 1000 * patienceS;
    for (;;) {
      const word = await this.acks.get(Math.max(0, deadline - performance.now()));
      if (word === undefined || word === "again") return null;
      if (word.nonce === nonce && word.sha256 === sha256) return word;
    }
  }

  /** Forget reasons to send again that came before this sending, but no words of the server. */
  private forgetReasons(): void {
    for (const word of this.acks.drain()) if (word !== "again") this.acks.put(word);
  }
}
