/** The options of `edgefl device`, as far as a browser has a use for them. */
import { readFileSync, statSync } from "node:fs";
import { homedir } from "node:os";
import { join, resolve } from "node:path";
import { parseArgs } from "node:util";

export class UsageError extends Error {}

const UNITS = { B: 1, KB: 1e3, MB: 1e6, GB: 1e9, KIB: 2 ** 10, MIB: 2 ** 20, GIB: 2 ** 30 };

const OPTIONS = {
  id: { type: "string" },
  broker: { type: "string" },
  federation: { type: "string", default: "demo" },
  data: { type: "string" },
  store: { type: "string" },
  engine: { type: "string", default: "onnx" },
  "server-key": { type: "string", default: "" },
  token: { type: "string", default: "" },
  tier: { type: "string", default: "" },
  memory: { type: "string", default: "" },
  threads: { type: "string", default: "1" },
  limit: { type: "string", multiple: true, default: [] },
  policy: { type: "string", default: "" },
  "bad-rows": { type: "string", default: "refuse" },
  sandbox: { type: "string", default: "auto" },
  "until-done": { type: "boolean", default: false },
  tune: { type: "boolean", default: false },
  json: { type: "boolean", default: false },
};

/** What was asked for; UsageError says what cannot be. */
export function readOptions(words, environment) {
  let values;
  try {
    ({ values } = parseArgs({ args: words, options: OPTIONS, allowNegative: true }));
  } catch (error) {
    throw new UsageError(error.message);
  }
  if (!values.id) throw new UsageError("name this device: --id NAME");
  if (!values.data) throw new UsageError("name its data: --data FILE.npz");
  if (!["onnx", "wasm", "webgpu"].includes(values.engine)) {
    throw new UsageError(`a browser runs onnx graphs, not --engine ${values.engine}: leave it out, or use another agent`);
  }
  const data = resolve(values.data);
  if (!isFile(data)) throw new UsageError(`--data ${values.data} is no file: a browser's device takes an .npz with x and y`);
  return {
    id: values.id,
    broker: brokerOf(values.broker ?? environment.EDGEFL_BROKER ?? "localhost:1883"),
    federation: values.federation,
    engine: values.engine === "webgpu" ? "webgpu" : "wasm",
    data,
    store: resolve(values.store ?? join(homedir(), ".edgefl", values.federation, values.id)),
    serverKeys: values["server-key"] ? values["server-key"].split(",").map((key) => key.trim()) : [],
    token: tokenOf(values.token || environment.EDGEFL_TOKEN || ""),
    tier: values.tier,
    memory: values.memory ? bytesOf(values.memory) : 0,
    threads: Number(values.threads) || 1,
    limits: Object.fromEntries(values.limit.map(limitOf)),
    untilDone: values["until-done"],
    json: values.json,
  };
}

export function isFile(path) {
  try {
    return statSync(path).isFile();
  } catch {
    return false;
  }
}

/** A WebSocket's URL as it is; a host and port of MQTT are bridged. */
function brokerOf(text) {
  if (/^wss?:\/\//.test(text)) return { url: text };
  const plain = /^(mqtts?:\/\/)?(?:([^:@]+):([^@]*)@)?(\[[^\]]+\]|[^:/]+)(?::(\d+))?\/?$/.exec(text);
  if (!plain) throw new UsageError(`the broker '${text}' is no HOST:PORT and no ws:// URL`);
  const tls = plain[1] === "mqtts://";
  return {
    host: plain[4].replace(/^\[|\]$/g, ""), port: Number(plain[5] ?? (tls ? 8883 : 1883)), tls,
    ...(plain[2] ? { username: decodeURIComponent(plain[2]), password: decodeURIComponent(plain[3] ?? "") } : {}),
  };
}

/** A secret stands in a file: `@FILE`. */
function tokenOf(text) {
  if (!text.startsWith("@")) return text;
  try {
    return readFileSync(text.slice(1), "utf8").trim();
  } catch (error) {
    throw new UsageError(`the token's file cannot be read: ${error.message}`);
  }
}

function bytesOf(text) {
  const found = /^(\d+(?:\.\d+)?)\s*([kmg]?i?b)$/i.exec(text.trim());
  const unit = found && UNITS[found[2].toUpperCase()];
  if (!unit) throw new UsageError(`--memory ${text} is no size: write it like 64MiB`);
  return Math.round(Number(found[1]) * unit);
}

function limitOf(text) {
  const [name, value] = text.split("=");
  if (!name || value === undefined || !Number.isFinite(Number(value))) throw new UsageError(`--limit ${text} is not KEY=NUMBER`);
  return [name, Number(value)];
}
