/** What a page asks for, read and checked. */
import { OnnxEngine } from "../engine/onnx";
import { WebGpuEngine } from "../engine/webgpu";
import { hex } from "../wire/digests";
import { parseToken } from "../wire/enrolment";
import { ConfigError } from "../wire/errors";
import { parseKey } from "../wire/keys";
import { DEFAULT_LIMITS, type Limits } from "../wire/limits";
import type { Prepared } from "./agent";
import type { AgentConfig } from "./messages";

const SHARE = 4;
const MOST_BYTES = 2 * 2 ** 30;
const UNKNOWN_BYTES = 512 * 2 ** 20;

/** `tell`: people, of what an engine finds out. */
export function prepare(config: AgentConfig, tell: (text: string) => void): Prepared {
  if (!/^wss?:\/\//.test(config.broker)) {
    throw new ConfigError(`a browser reaches a broker by ws:// or wss://, not at '${config.broker}'`);
  }
  const token = config.token ? parseToken(config.token) : null;
  const given = (config.serverKeys ?? []).map((key) => hex(parseKey(key)));
  const keys = given.length || token === null ? given : [hex(token.server)];
  const limits: Limits = { ...DEFAULT_LIMITS, ...config.limits };
  const assets = new URL(config.assets ?? "./ort/", globalThis.location?.href).href;
  const engine = config.engine === "webgpu"
    ? new WebGpuEngine(assets, tell)
    : new OnnxEngine({ assets, threads: threadsOf(config, tell) });
  return { config, limits, memoryBytes: config.memory || memoryOf(), keys, token, engine };
}

/** Several need memory that threads share, which only a cross-origin isolated page has. */
function threadsOf(config: AgentConfig, tell: (text: string) => void): number {
  const wanted = config.threads ?? 1;
  if (wanted === 1 || globalThis.crossOriginIsolated) return wanted;
  tell(`this page is not cross-origin isolated: onnxruntime runs on one thread, not on ${wanted}`);
  return 1;
}

/** Bytes that a page may take: browsers end tabs that take more than a part of what there is. */
function memoryOf(): number {
  const gib = (globalThis.navigator as { deviceMemory?: number } | undefined)?.deviceMemory;
  return gib === undefined ? UNKNOWN_BYTES : Math.min(MOST_BYTES, (gib * 2 ** 30) / SHARE);
}
