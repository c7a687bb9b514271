/** Topic names, client ids, and what a PUBLISH packet takes. */
import { hmac } from "@noble/hashes/hmac.js";
import { sha256 } from "@noble/hashes/sha2.js";
import { utf8 } from "./digests";
import { ConfigError } from "./errors";

export const NO_SHARD = -1;
const NAME = /^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$/;
const DIGITS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ";
const LETTERS = 23;

function checkedName(kind: string, name: string): string {
  if (!NAME.test(name)) {
    throw new ConfigError(
      `${kind} '${name}' is not usable: use 1 to 63 letters, digits, '.', '_' or '-', starting with a letter or digit`,
    );
  }
  return name;
}

/** Of one device of one federation. */
export class Topics {
  readonly root: string;
  private readonly mine: string;

  constructor(readonly federation: string, readonly device: string) {
    this.root = `edgefl/v1/${checkedName("federation", federation)}`;
    this.mine = `${this.root}/devices/${checkedName("device", device)}`;
  }

  get currentRound(): string { return `${this.root}/rounds/current`; }
  get status(): string { return `${this.mine}/status`; }
  get hello(): string { return `${this.mine}/hello`; }
  get progress(): string { return `${this.mine}/progress`; }
  get tasks(): string { return `${this.mine}/tasks`; }
  get acks(): string { return `${this.mine}/acks`; }
  get declines(): string { return `${this.mine}/declines`; }

  blobChunk(sha256: string, index: number): string {
    return `${this.root}/blobs/${sha256}/${index}`;
  }

  update(round: number, index: number, shard = NO_SHARD): string {
    return `${this.mine}/${shard === NO_SHARD ? "updates" : `shards/${shard}`}/${round}/${index}`;
  }

  /** 23 letters that only the holder of `secret` can compute, so that nobody else connects with them. */
  clientId(secret: Uint8Array): string {
    let number = hmac(sha256, secret, utf8(`edgefl:device:${this.federation}:${this.device}`)).reduce((sum, byte) => sum * 256n + BigInt(byte), 0n);
    let found = "";
    for (let place = 0; place < LETTERS; place++) {
      found += DIGITS[Number(number % 62n)];
      number /= 62n;
    }
    return found;
  }
}

/** Size of the PUBLISH packet of MQTT 3.1.1. */
export function publishBytes(topic: string, payload: number, qos: number): number {
  const rest = 2 + utf8(topic).length + (qos ? 2 : 0) + payload;
  let digits = 1;
  while (rest >= 128 ** digits) digits++;
  return 1 + digits + rest;
}
