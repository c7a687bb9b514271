/** The page on which a browser joins a federation: `edgefl run --web` serves it, its agent runs in a worker. */
import type { AgentConfig, Data, FromWorker, ToWorker } from "../worker/messages";
import { JoinForm } from "./form";
import { keepChoices, readChoices, type Choices } from "./identity";
import { asked, brokerOf, readOffer, secretOf, type Offer } from "./offer";
import { START, after, type PageState } from "./state";
import { Awake, watch } from "./surroundings";
import { element, problem, show } from "./view";

const secret = secretOf(location.hash);
/** How long a link is down before it is worth a word. */
const LOOK_MS = 4000;

class Page {
  private state: PageState = START;
  private worker: Worker | null = null;
  private readonly awake = new Awake();
  private readonly seen = watch((surroundings) => this.post({ type: "surroundings", surroundings }));
  private readonly form: JoinForm;
  private drawing = false;

  constructor(private readonly offer: Offer) {
    const choices = readChoices(offer.federation);
    this.form = new JoinForm(offer, secret, choices);
    this.form.onJoin((chosen, data) => void this.join(chosen, data));
    element("pause").addEventListener("click", () => this.post({ type: this.state.phase === "paused" ? "resume" : "pause" }));
    element("leave").addEventListener("click", () => this.leave());
    void this.showOthers();
    if (choices?.joined) void this.again(choices);
    else this.ask();
  }

  private ask(): void {
    element("work").hidden = true;
    element("join").hidden = false;
    document.body.dataset["state"] = "asking";
    element("link").textContent = "not connected";
  }

  /** A page that is loaded again goes on; where its data are gone, their owner is asked. */
  private async again(choices: Choices): Promise<void> {
    try {
      await this.join(choices, await this.form.data());
    } catch {
      this.ask();
    }
  }

  private async join(choices: Choices, data: Data): Promise<void> {
    keepChoices(this.offer.federation, choices);
    void navigator.storage?.persist?.(); // so that a full disk does not cost an update that waits
    this.state = START;
    element("join").hidden = true;
    element("work").hidden = false;
    show(this.state);
    const worker = new Worker(new URL("worker.js", document.baseURI), { type: "module" });
    this.worker = worker;
    worker.onmessage = (said: MessageEvent<FromWorker>) => this.take(said.data);
    worker.onerror = (error) => this.take({ type: "ended", code: 1, error: error.message || "the agent could not be loaded" });
    const surroundings = await this.seen;
    this.post({ type: "start", config: this.config(choices, data), surroundings: surroundings() });
  }

  private config(choices: Choices, data: Data): AgentConfig {
    return {
      id: choices.id,
      broker: brokerOf(this.offer, secret, location),
      federation: this.offer.federation,
      data: data.kind === "url" ? { kind: "url", url: new URL(data.url, location.href).href } : data,
      tier: choices.tier,
      threads: globalThis.crossOriginIsolated ? choices.threads : 1,
      pauseHidden: choices.pauseHidden,
      ...(choices.memory ? { memory: choices.memory } : {}),
      ...(this.offer.server_keys.length ? { serverKeys: this.offer.server_keys } : {}),
      ...this.form.login,
    };
  }

  private post(message: ToWorker): void {
    this.worker?.postMessage(message);
  }

  private take(message: FromWorker): void {
    this.state = after(this.state, message, Date.now());
    if (message.type === "event" && message.event === "offline") setTimeout(() => void this.lookForServer(), LOOK_MS);
    this.awake.want(this.state.phase === "training" || this.state.phase === "waiting");
    if (message.type === "ended") {
      this.worker?.terminate();
      this.worker = null;
    }
    this.draw();
  }

  /** Where the link stays down, whether the machine is there at all: a run that is over takes its page's server along. */
  private async lookForServer(): Promise<void> {
    if (this.state.link !== "down" || this.state.phase === "done" || this.worker === null) return;
    const there = await fetch(asked("/api/offer", secret)).then(() => true, () => false);
    if (there) return;
    this.state = { ...this.state, phase: "waiting", doing: "The run is over, or its machine is away. This page waits for it." };
    this.draw();
  }

  /** Once a frame, however much is said; at once where nobody looks, as frames stand still then. */
  private draw(): void {
    if (document.visibilityState === "hidden") return show(this.state);
    if (this.drawing) return;
    this.drawing = true;
    requestAnimationFrame(() => {
      this.drawing = false;
      show(this.state);
    });
  }

  private leave(): void {
    const choices = readChoices(this.offer.federation);
    if (choices) keepChoices(this.offer.federation, { ...choices, joined: false });
    if (this.worker === null) this.ask();
    else this.post({ type: "stop" });
  }

  private async showOthers(): Promise<void> {
    const answer = await fetch(asked("/api/code.svg", secret));
    if (!answer.ok) return;
    element<HTMLImageElement>("code").src = URL.createObjectURL(await answer.blob());
    element("address").textContent = location.href;
    element("others").hidden = false;
  }
}

function hint(): void {
  if (globalThis.isSecureContext) return;
  element("hint").textContent =
    "This page came over http: it trains on one thread, and the screen may go dark. " +
    "The run's --web-cert-file and --web-key-file make it https.";
}

async function start(): Promise<void> {
  try {
    const offer = await readOffer(secret);
    hint();
    new Page(offer);
  } catch (error) {
    document.body.dataset["state"] = "refused";
    problem((error as Error).message);
    element("link").textContent = "not connected";
  }
}

addEventListener("hashchange", () => location.reload());
void start();
