/** The messages of protocol version 1 that a device reads or writes. */
import { BlobRef } from "./blobs";
import { ProtocolError } from "./errors";
import { decode, Float, type Value } from "./msgpack";
import {
  bool, bytes, type Codec, dict, either, encoded, float, int, int64, list, nullable, numbered, omitted, oneOf, type Read,
  required, str, struct, unset,
} from "./schema";

export const VERSION = 1;
/** `v` of a Round that means nothing to whoever reads version 1. */
export const ELSEWHERE = 3;

/** One of the protocol's messages: its name, the context of its signature, how it is read and written. */
export interface Kind<T> {
  name: string;
  context: string;
  codec: Codec<T>;
  versions: number[];
}

const v = either(int, () => VERSION);

const Offer = struct("Offer", { bundles: required(dict(BlobRef)), signatures: either(dict(bytes), (): Record<string, Uint8Array> => ({})) });
const units = dict(list(BlobRef));
const Live = struct("Live", { model_version: required(str), units: required(units), hyper: required(dict(float)) });

const RoundFields = struct("Round", {
  v,
  run: required(str),
  round: required(int),
  state: required(oneOf("open", "closed", "done")),
  model_version: required(str),
  offers: required(dict(Offer)),
  units: required(units),
  hyper: required(dict(float)),
  base: required(int),
  deadline: required(float),
  mirrors: omitted(list(str), () => []),
  mirrors_only: omitted(bool, () => false),
  pages: omitted(nullable(BlobRef), () => null),
  live: omitted(numbered(Live), () => new Map()),
});
export type Round = Read<typeof RoundFields>;

const Conditions = struct("Conditions", {
  power: omitted(str, () => ""),
  link: omitted(str, () => ""),
  thermal: omitted(str, () => ""),
  available: omitted(nullable(bool), () => null),
});
export type Conditions = Read<typeof Conditions>;

const ResourceUsage = struct("ResourceUsage", {
  step_ms: required(float),
  forward_ms: required(float),
  load_ms: required(float),
  idle_bytes: required(int),
  peak_bytes: required(int),
  down_bytes: required(int),
  down_wire_bytes: required(int),
  variants: omitted(dict(str), (): Record<string, string> => ({})),
  dropped: omitted(dict(str), (): Record<string, string> => ({})),
  mirror_bytes: omitted(int, () => 0),
});
export type ResourceUsage = Read<typeof ResourceUsage>;

function kind<T>(name: string, context: string, codec: Codec<T>, versions = [VERSION]): Kind<T> {
  return { name, context, codec, versions };
}

export const Round: Kind<Round> = kind("Round", "announcement", RoundFields, [VERSION, ELSEWHERE]);
export const Status = kind("Status", "status", struct("Status", { v, online: required(bool) }));
export const Hello = kind("Hello", "hello", struct("Hello", {
  v,
  agent: required(str),
  memory_bytes: required(int),
  cores: required(int),
  samples: required(int),
  engines: required(dict(str)),
  tier: either(str, () => ""),
  token: either(str, () => ""),
  proof: either(bytes, () => new Uint8Array()),
  conditions: unset(Conditions),
  again: unset(bool),
}));
export const Task = kind("Task", "task", struct("Task", {
  v,
  run: required(str),
  round: required(int),
  tier: required(str),
  seed: required(int64),
  nonce: required(str),
  samples: either(int, () => 0),
  ask: unset(bool),
  progress_s: unset(float),
  shard: unset(int),
}));
export const Progress = kind("Progress", "progress", struct("Progress", {
  v,
  round: required(int),
  tier: required(str),
  stage: required(str),
  step: required(int),
  steps: required(int),
  loss: required(float),
  step_ms: required(float),
  peak_bytes: required(int),
  down_bytes: required(int),
  up_bytes: required(int),
}));
export const UpdateChunk = kind("UpdateChunk", "update", struct("UpdateChunk", {
  v,
  nonce: required(str),
  sha256: required(str),
  index: required(int),
  count: required(int),
  size: required(int),
  data: required(bytes),
}));
export const Ack = kind("Ack", "ack", struct("Ack", {
  v,
  round: required(int),
  nonce: required(str),
  status: required(oneOf("accepted", "missing", "rejected")),
  missing: either(list(int), () => []),
  reason: either(str, () => ""),
  text: either(str, () => ""),
  sha256: either(str, () => ""),
  later_s: unset(float),
}));
export const Decline = kind("Decline", "decline", struct("Decline", {
  v,
  round: required(int),
  nonce: required(str),
  reason: required(str),
  text: either(str, () => ""),
}));

/** What the chunks of an update join to; it has no envelope of its own. */
export const Update = kind("Update", "", struct("Update", {
  v,
  run: required(str),
  round: required(int),
  device: required(str),
  nonce: required(str),
  tier: required(str),
  model_version: required(str),
  samples: required(int),
  metrics: required(dict(float)),
  profile: required(ResourceUsage),
  codec: required(str),
  codec_version: required(int),
  tensors: required(bytes),
}));

/** The blob that has what a Round with `pages` offers. */
export const Page = struct("Page", {
  offers: required(dict(Offer)),
  units: required(units),
  live: omitted(numbered(units), () => new Map()),
});

type Of<K> = K extends Kind<infer T> ? T : never;
export type Status = Of<typeof Status>;
export type Hello = Of<typeof Hello>;
export type Task = Of<typeof Task>;
export type Progress = Of<typeof Progress>;
export type UpdateChunk = Of<typeof UpdateChunk>;
export type Ack = Of<typeof Ack>;
export type Decline = Of<typeof Decline>;
export type Update = Of<typeof Update>;
export type Offer = Read<typeof Offer>;

/** `v` of what should be a message, of any version; 1 where it is missing. */
export function versionOf(name: string, value: Value): number {
  if (!(value instanceof Map)) throw new ProtocolError(`${name} message is malformed: it is no map`);
  const found = value.get("v") ?? VERSION;
  if (found instanceof Float || typeof found !== "number") {
    throw new ProtocolError(`${name} message is malformed: its v is no int`);
  }
  return found;
}

/** The message in `payload`; ProtocolError if it is malformed or of another version. */
export function read<T>(kind: Kind<T>, payload: Uint8Array): T {
  const value = decode(payload);
  const version = versionOf(kind.name, value);
  if (!kind.versions.includes(version)) {
    throw new ProtocolError(
      `${kind.name} has protocol version ${version}, this side speaks ${kind.versions.join(" and ")}: install the edgefl ` +
        "release that the other side runs",
    );
  }
  const message = kind.codec.read(value, "");
  if (kind.name === Round.name) checkRound(message as unknown as Round);
  return message;
}

export function written<T>(kind: Kind<T>, message: T): Uint8Array {
  return encoded(kind.codec, message);
}

function checkRound(round: Round): void {
  if ((round.pages !== null || round.mirrors_only) && round.v !== ELSEWHERE) {
    throw new ProtocolError(`a Round of version ${round.v} has no pages and no mirrors_only, found them: it is refused`);
  }
  if (round.pages !== null && (Object.keys(round.offers).length || Object.keys(round.units).length)) {
    throw new ProtocolError("a Round with pages has its offers and units there, found some beside them: it is refused");
  }
}
