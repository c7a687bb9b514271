/** The dedicated worker that holds the agent. It talks with its page by ./messages alone. */
import { EdgeflError, said } from "../wire/errors";
import { Agent } from "./agent";
import { holdDevice } from "./lock";
import type { AgentConfig, FromWorker, DeviceConditions, ToWorker } from "./messages";
import { prepare } from "./prepare";

const post = (message: FromWorker): void => globalThis.postMessage(message);
let agent: Agent | null = null;
/** What the page said so far: an agent that is made later has to know it. */
let seen: DeviceConditions = {};
let paused = false;
let stop: () => void = () => undefined;
const stopped = new Promise<null>((resolve) => (stop = () => resolve(null)));

async function start(config: AgentConfig): Promise<void> {
  let release: (() => void) | null = null;
  try {
    const prepared = prepare(config, (text) => post({ type: "event", event: "engine", text, details: {} }));
    const held = holdDevice(`edgefl:${config.federation}:${config.id}`, () => busy(config.id));
    release = await Promise.race([held, stopped]);
    if (release === null) void held.then((late) => late(), () => undefined);
    else await run(await Agent.make(prepared, seen, post));
    post({ type: "ended", error: "", code: 0 });
  } catch (error) {
    post({ type: "ended", error: said(error), code: error instanceof EdgeflError ? error.code : 1 });
  } finally {
    release?.();
  }
}

async function run(made: Agent): Promise<void> {
  agent = made;
  made.see(seen);
  made.pause(paused);
  void stopped.then(() => made.stop());
  await made.run();
}

function busy(id: string): void {
  const text = `another tab runs as ${id}: this one waits, and goes on once that is closed`;
  post({ type: "event", event: "busy", text, details: {} });
}

globalThis.onmessage = (event: MessageEvent<ToWorker>): void => {
  const message = event.data;
  switch (message.type) {
    case "start":
      seen = { ...seen, ...message.surroundings };
      void start(message.config);
      break;
    case "surroundings":
      seen = { ...seen, ...message.surroundings };
      agent?.see(message.surroundings);
      break;
    case "pause":
    case "resume":
      paused = message.type === "pause";
      agent?.pause(paused);
      break;
    case "stop": stop();
  }
};
