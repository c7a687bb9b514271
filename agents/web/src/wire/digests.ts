/** SHA-256 and hexadecimal. The browser's own hash is used for large pieces where it is to be had (a secure context). */
import { sha256 } from "@noble/hashes/sha2.js";

const LARGE_BYTES = 1 << 15;

/** 32 bytes. For small pieces: at once, anywhere. */
export function digestNow(data: Uint8Array): Uint8Array {
  return sha256(data);
}

/** 32 bytes. */
export async function digest(data: Uint8Array): Promise<Uint8Array> {
  const subtle = globalThis.crypto?.subtle;
  if (subtle === undefined || data.length < LARGE_BYTES) return sha256(data);
  return new Uint8Array(await subtle.digest("SHA-256", data as Uint8Array<ArrayBuffer>));
}

export function hex(data: Uint8Array): string {
  let text = "";
  for (const byte of data) text += byte.toString(16).padStart(2, "0");
  return text;
}

export function fromHex(text: string): Uint8Array {
  if (text.length % 2 || !/^[0-9a-fA-F]*$/.test(text)) throw new RangeError(`no hexadecimal digits: ${text.slice(0, 20)}`);
  return Uint8Array.from({ length: text.length / 2 }, (_, index) => parseInt(text.slice(2 * index, 2 * index + 2), 16));
}

export async function hexDigest(data: Uint8Array): Promise<string> {
  return hex(await digest(data));
}

export function equal(one: Uint8Array, other: Uint8Array): boolean {
  return one.length === other.length && one.every((byte, index) => byte === other[index]);
}

export function joined(parts: readonly Uint8Array[]): Uint8Array {
  const whole = new Uint8Array(parts.reduce((sum, part) => sum + part.length, 0));
  let at = 0;
  for (const part of parts) {
    whole.set(part, at);
    at += part.length;
  }
  return whole;
}

export function utf8(text: string): Uint8Array {
  return new TextEncoder().encode(text);
}
