/** The agent: connects, says what it is, takes tasks, runs rounds, keeps its store. */
import { load } from "../data/load";
import type { LocalSamples } from "../data/samples";
import type { Engine } from "../engine/base";
import { Fetcher } from "../link/fetch";
import { conditionsOf, HelloSender } from "../link/presence";
import { ServerTrust, speakerOf } from "../link/identity";
import { Listening } from "../link/listening";
import { pause } from "../link/mailbox";
import { Mirrors } from "../link/mirrors";
import { NoticeLimiter } from "../link/notices";
import { Outbox, pastOf } from "../link/outbox";
import { type Event, Session } from "../link/session";
import { StatusReporter } from "../link/status";
import { RoundScheduler } from "../round/scheduler";
import { readPages } from "../round/pages";
import { ProgressMessages } from "../round/progress";
import { type ExecutorParts, work } from "../round/executor";
import { BlobStore } from "../store/blobs";
import type { Outgoing } from "../store/rows";
import { Store } from "../store/store";
import { utf8 } from "../wire/digests";
import type { MessageSigner } from "../wire/envelope";
import { IdentityError, ProtocolError, DuplicateMessageError, said } from "../wire/errors";
import { proof, type Token } from "../wire/enrolment";
import type { Limits } from "../wire/limits";
import { Ack, Decline, Hello, type Kind, Round, Status, Task } from "../wire/messages";
import { Topics } from "../wire/topics";
import { ConditionsMonitor } from "./conditions";
import type { AgentConfig, AgentEvent, EventName, FromWorker, DeviceConditions } from "./messages";
import { AGENT } from "./version";

const LOOK_MS = 250;
const MOST_TEXT = 2000;

/** A device's configuration, read and checked. */
export interface Prepared {
  config: AgentConfig;
  limits: Limits;
  memoryBytes: number;
  keys: string[];
  token: Token | null;
  engine: Engine;
}

export class Agent {
  private readonly topics: Topics;
  private readonly session: Session;
  private readonly fetcher: Fetcher;
  private readonly outbox: Outbox;
  private readonly scheduler: RoundScheduler;
  private readonly listening: Listening;
  private readonly greeting: HelloSender;
  private readonly neighbourhood: StatusReporter;
  private readonly refusals: NoticeLimiter;
  private readonly trust: ServerTrust;
  private readonly gate: ConditionsMonitor;
  private stopping = false;
  private onlineAt = 0n;
  private wakeUp: () => void = () => undefined;

  /** Opens the store and reads the data; an EdgeflError says what cannot be. */
  static async make(prepared: Prepared, seen: DeviceConditions, post: (message: FromWorker) => void): Promise<Agent> {
    const { config, limits } = prepared;
    new Topics(config.federation, config.id); // refuses names before anything is kept under them
    const data = await load(config.data);
    const store = await Store.open(config.federation, config.id, limits.history_rounds);
    return new Agent(prepared, seen, data, store, await speakerOf(store), post);
  }

  private constructor(
    private readonly prepared: Prepared,
    seen: DeviceConditions,
    private readonly data: LocalSamples,
    private readonly store: Store,
    private readonly speaker: MessageSigner,
    private readonly post: (message: FromWorker) => void,
  ) {
    const { config, limits, engine } = prepared;
    const topics = (this.topics = new Topics(config.federation, config.id));
    const say = this.say.bind(this);
    const address = { url: config.broker, ...(config.username === undefined ? {} : { username: config.username, password: config.password ?? "" }) };
    this.session = new Session(address, topics.clientId(this.speaker.keys.sign(utf8("edgefl/v1/client-id"))), limits, () => this.will(), (event) => this.take(event));
    this.trust = new ServerTrust(store, prepared.keys, say);
    this.gate = new ConditionsMonitor(config, seen, (reason, before) => this.paused(reason ?? before!, reason !== null));
    const blobs = new BlobStore(store, limits.store_bytes);
    this.fetcher = new Fetcher(this.session, topics, blobs, limits, () => this.scheduler.isOver(), new Mirrors(limits, (text) => say("mirror", text)));
    this.outbox = new Outbox(
      this.session, topics, store, limits, this.speaker, (outgoing, ack) => this.settled(outgoing, ack), (text) => say("store", text),
    );
    const progress = new ProgressMessages(
      this.session, topics, this.fetcher, this.speaker, () => engine.bytes(), () => this.outbox.sentBytes, post,
    );
    const dropped: ExecutorParts["dropped"] = (text, carry) => say("carry", text, { run: carry.name.split("/", 1)[0]!, round: carry.round });
    const bench: ExecutorParts = {
      device: config.id, limits, memoryBytes: prepared.memoryBytes, engine, data, fetcher: this.fetcher, store, blobs,
      trust: this.trust, open: () => this.gate.open(), aborted: () => this.scheduler.isOver(), dropped,
      begins: (job, rows, steps) => say("round", `round ${job.round} as ${job.tier}: ${rows} samples, ${steps} steps`, { round: job.round, tier: job.tier, samples: rows, steps }),
      watch: (job, step) => progress.watch(job, step),
    };
    this.scheduler = new RoundScheduler({
      store, outbox: this.outbox, progress, format: engine.format, retryPauseS: limits.retry_pause_s,
      stopping: () => this.stopping, say, dropped, wake: () => this.wakeUp(),
      work: (job) => work(bench, job).finally(() => engine.rest()),
      read: (announced) => readPages(announced, this.fetcher, limits),
      send: (decline) => void this.publish(topics.declines, Decline, decline),
    });
    this.listening = new Listening(this.session, topics.currentRound, () => this.scheduler.isIdle());
    this.greeting = new HelloSender(
      this.about(), (hello) => void this.publish(topics.hello, Hello, hello, true),
      () => conditionsOf(this.gate.surroundings, this.gate.reason === null), limits.conditions_s,
    );
    this.neighbourhood = new StatusReporter(config.federation, config.id, config.broker, limits.notice_s, say);
    this.refusals = new NoticeLimiter(limits.notice_s);
  }

  private about() {
    const { config, memoryBytes, token, engine } = this.prepared;
    const hello = this.topics.hello;
    return {
      agent: AGENT,
      memory_bytes: memoryBytes,
      cores: globalThis.navigator?.hardwareConcurrency ?? 1,
      samples: this.data.count,
      engines: { [engine.name]: engine.version },
      tier: config.tier ?? "",
      token: token?.name ?? "",
      proof: token ? proof(token.secret, hello, this.speaker.keys.public) : new Uint8Array(),
    };
  }

  /** Serve until done (if asked to) or stopped. */
  async run(): Promise<void> {
    this.session.subscribe([this.topics.currentRound, this.topics.tasks, this.topics.acks], 1, true);
    const [connecting, sending] = [this.session.run(), this.outbox.run()];
    while (!this.stopping && !(this.prepared.config.untilDone && this.scheduler.isDone())) {
      this.turn();
      await Promise.race([pause(LOOK_MS), new Promise<void>((resolve) => (this.wakeUp = resolve))]);
    }
    this.stopping = true;
    this.gate.free();
    this.fetcher.poke();
    this.outbox.stop();
    await this.scheduler.idle();
    const goodbye = this.publish(this.topics.status, Status, { v: 1, online: false }, true);
    await Promise.race([goodbye, pause(2000)]);
    await this.session.stop();
    await Promise.race([Promise.all([connecting, sending]), pause(2000)]);
    this.store.close();
  }

  stop(): void {
    this.stopping = true;
    this.gate.free();
    this.wakeUp();
  }

  pause(paused: boolean): void {
    this.gate.ask(paused);
  }

  see(seen: DeviceConditions): void {
    this.gate.see(seen);
  }

  private turn(): void {
    if (this.gate.reason === null) this.scheduler.begin();
    const connected = this.session.connected;
    this.neighbourhood.step(
      connected && this.scheduler.announced === null, connected ? this.scheduler.roundWithoutUs() : 0, () => this.scheduler.tookPart(),
    );
    this.greeting.step(connected);
  }

  // -- what happens --------------------------------------------------------------------------------------------

  private take(event: Event): void {
    if (event.kind === "up") this.greet();
    else if (event.kind === "down") this.neighbourhood.offline(event);
    else if (event.kind === "refused") this.neighbourhood.denied(event);
    else this.route(event.topic, event.payload);
    this.wakeUp();
  }

  /** Of the connection that is made now: its number is after the one of what this device says first. */
  private will() {
    this.onlineAt = this.speaker.numbers.next(2n);
    const topic = this.topics.status;
    return { topic, payload: this.speaker.seal(topic, Status, { v: 1, online: false }, this.onlineAt + 1n) };
  }

  private greet(): void {
    this.listening.begin();
    const topic = this.topics.status;
    const online = this.speaker.seal(topic, Status, { v: 1, online: true }, this.onlineAt);
    void this.session.publish(topic, online, { retain: true });
    this.greeting.hello();
    this.fetcher.poke();
    this.outbox.sendAgain();
    const { id, broker } = this.prepared.config;
    this.say("online", `connected to ${broker.split("?")[0]} as ${id}`, { samples: this.data.count });
    this.scheduler.declare();
  }

  private route(topic: string, payload: Uint8Array): void {
    try {
      this.hear(topic, payload);
    } catch (error) {
      if (error instanceof DuplicateMessageError) return;
      const reason = error instanceof IdentityError ? error.reason : error instanceof ProtocolError ? "malformed" : "failed";
      if (this.refusals.due(`${topic} ${reason}`)) this.say("refused", `ignored a message on ${topic}: ${said(error)}`);
    }
  }

  /** What it says is done; ProtocolError if it is malformed, not the server's, or a copy. */
  private hear(topic: string, payload: Uint8Array): void {
    if (topic.startsWith(`${this.topics.root}/blobs/`)) this.fetcher.deliver(topic, payload);
    else if (!payload.length) return;
    else if (topic === this.topics.currentRound) {
      const announced = this.trust.open(Round, topic, payload);
      this.neighbourhood.announced(announced);
      this.fetcher.mirrors.announced(announced);
      this.scheduler.announce(announced);
      this.listening.heard(announced);
    } else if (topic === this.topics.tasks) {
      this.scheduler.assign(this.trust.open(Task, topic, payload));
      this.listening.begin();
    } else if (topic === this.topics.acks) {
      const ack = this.trust.open(Ack, topic, payload);
      if (ack.nonce) return this.outbox.deliver(ack);
      this.neighbourhood.answered(ack);
      this.greeting.answered(ack);
    }
  }

  /** The server accepted or refused an update. */
  private async settled(outgoing: Outgoing, ack: Ack): Promise<void> {
    const past = pastOf(outgoing, ack);
    await this.store.settle(past);
    const text = `round ${past.round}: ${ack.status} ${ack.text}`.trimEnd();
    this.say(ack.status === "accepted" ? "accepted" : "rejected", text, {
      round: past.round, loss: past.loss, ...(ack.reason ? { reason: ack.reason } : {}),
    });
    this.wakeUp();
  }

  private paused(reason: string, isPaused: boolean): void {
    const why = { asked: "as it was asked to", hidden: "while the page is hidden", battery: "until the battery has more" }[reason];
    this.say(isPaused ? "paused" : "resumed", isPaused ? `this device stands still ${why}` : "this device goes on", { reason });
    this.wakeUp();
  }

  private publish<T>(topic: string, kind: Kind<T>, message: T, retain = false): Promise<boolean> {
    if (!this.session.connected) return Promise.resolve(false);
    return this.session.publish(topic, this.speaker.seal(topic, kind, message), { retain });
  }

  private say(event: EventName, text: string, details: AgentEvent["details"] = {}): void {
    this.post({ type: "event", event, text: printable(text), details });
  }
}

function printable(text: string): string {
  return text.replace(/[\p{Cc}\p{Cf}\p{Zl}\p{Zp}]+/gu, " ").slice(0, MOST_TEXT);
}
