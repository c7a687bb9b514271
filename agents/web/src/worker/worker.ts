/** The dedicated worker that holds the agent. It talks with its page by ./messages alone. */
import { EdgeflError, said, StoreError } from "../wire/errors";
import { Agent } from "./agent";
import { holdDevice } from "./lock";
import type { AgentConfig, FromWorker, Surroundings, ToWorker } from "./messages";
import { prepare } from "./prepare";

const post = (message: FromWorker): void => globalThis.postMessage(message);
let agent: Agent | null = null;
let stopped = false;

async function start(config: AgentConfig, seen: Surroundings): Promise<void> {
  let release: (() => void) | null = null;
  try {
    const prepared = prepare(config, seen, (text) => post({ type: "event", event: "engine", text, details: {} }));
    release = await holdDevice(`edgefl:${config.federation}:${config.id}`);
    if (release === null) {
      const text = `another tab runs as ${config.id}: use that one, or close it and load this page again`;
      post({ type: "event", event: "busy", text, details: {} });
      post({ type: "ended", error: text, code: new StoreError(text).code });
      return;
    }
    agent = await Agent.make(prepared, post);
    if (!stopped) await agent.run();
    post({ type: "ended", error: "", code: 0 });
  } catch (error) {
    post({ type: "ended", error: said(error), code: error instanceof EdgeflError ? error.code : 1 });
  } finally {
    release?.();
  }
}

globalThis.onmessage = (event: MessageEvent<ToWorker>): void => {
  const message = event.data;
  switch (message.type) {
    case "start": void start(message.config, message.surroundings ?? {}); break;
    case "surroundings": agent?.see(message.surroundings); break;
    case "pause": agent?.pause(true); break;
    case "resume": agent?.pause(false); break;
    case "stop":
      stopped = true;
      agent?.stop();
  }
};
