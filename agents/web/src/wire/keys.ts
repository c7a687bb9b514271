/**
 * Ed25519, and how one key follows another. In plain JavaScript: WebCrypto has it too, but only in a secure context, and a
 * phone that opens a page of the local network by http has none.
 */
import * as ed from "@noble/ed25519";
import { sha512 } from "@noble/hashes/sha2.js";
import { equal, fromHex, hex, utf8 } from "./digests";
import { ConfigError } from "./errors";
import { bytesOf, int64, type Read, required, struct } from "./schema";

ed.hashes.sha512 = sha512;

/** An expiry, in seconds since 1970, that does not come. */
export const FOREVER = 1n << 62n;

export const PublicKey = bytesOf(32);
export const Signature = bytesOf(64);
export const Succession = struct("Succession", {
  old: required(PublicKey),
  new: required(PublicKey),
  until: required(int64),
  signature: required(Signature),
});
export type Succession = Read<typeof Succession>;

export interface KeyPair {
  public: Uint8Array;
  sign(text: Uint8Array): Uint8Array;
}

export function newSecret(): Uint8Array {
  return crypto.getRandomValues(new Uint8Array(32));
}

export function keyPair(secret: Uint8Array): KeyPair {
  return { public: ed.getPublicKey(secret), sign: (text) => ed.sign(text, secret) };
}

/** Whether `signature` is that of the holder of `key` for `text`; by the strict rules, as OpenSSL has them. */
export function verify(key: Uint8Array, signature: Uint8Array, text: Uint8Array): boolean {
  try {
    return ed.verify(signature, text, key, { zip215: false });
  } catch {
    return false;
  }
}

/** 32 bytes out of 64 hexadecimal digits. */
export function parseKey(text: string): Uint8Array {
  if (!/^[0-9a-fA-F]{64}$/.test(text)) {
    throw new ConfigError(`a key has 64 hexadecimal digits, found ${text.length} characters`);
  }
  return fromHex(text);
}

/** What people are shown of a key. */
export function shown(key: Uint8Array | string): string {
  return (typeof key === "string" ? key : hex(key)).slice(0, 12);
}

function successionHolds(each: Succession): boolean {
  const text = `edgefl/succession/1\n${hex(each.old)}\n${hex(each.new)}\n${each.until}\n`;
  return verify(each.old, each.signature, utf8(text));
}

/** Known keys (hexadecimal) and their expiries, and those that `statements` introduce one after the other. */
export function knownAfter(known: ReadonlyMap<string, bigint>, statements: readonly Succession[]): Map<string, bigint> {
  const keys = new Map(known);
  const waiting = [...statements];
  for (;;) {
    const place = waiting.findIndex((each) => keys.get(hex(each.old)) === FOREVER && successionHolds(each));
    if (place < 0) return keys;
    const [found] = waiting.splice(place, 1) as [Succession];
    if (!keys.has(hex(found.new))) {
      keys.set(hex(found.old), found.until < FOREVER ? found.until : FOREVER - 1n);
      keys.set(hex(found.new), FOREVER);
    }
  }
}

export function sameStatement(one: Succession, other: Succession): boolean {
  return equal(one.signature, other.signature) && equal(one.new, other.new) && one.until === other.until;
}

/** BundleError's question: whether one of `known` signed the bundle whose manifest has this digest. */
export function signsBundle(known: readonly string[], sha256: string, signature: Uint8Array): boolean {
  const text = utf8(`edgefl/v1/bundle/${sha256}`);
  return signature.length === 64 && known.some((key) => verify(fromHex(key), signature, text));
}
