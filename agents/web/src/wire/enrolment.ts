/** One-time tokens by which a device brings its key onto the server's list. */
import { hmac } from "@noble/hashes/hmac.js";
import { sha256 } from "@noble/hashes/sha2.js";
import { fromHex, hex, utf8 } from "./digests";
import { ConfigError } from "./errors";

export interface Token {
  name: string;
  secret: Uint8Array;
  server: Uint8Array;
}

/** The token in `text`; ConfigError for another text, which it does not repeat. */
export function parseToken(text: string): Token {
  const found = /^efl1\.([0-9a-f]{16})\.([0-9a-f]{64})\.([0-9a-f]{64})$/.exec(text.trim());
  if (found === null) {
    throw new ConfigError(
      "the token is not one of `edgefl enroll token`: it begins with efl1. and has three parts of hexadecimal digits",
    );
  }
  return { name: found[1]!, secret: fromHex(found[2]!), server: fromHex(found[3]!) };
}

/** 32 bytes that only who has the token can make, for one device and key; `topic` is the one of the hello. */
export function proof(secret: Uint8Array, topic: string, key: Uint8Array): Uint8Array {
  return hmac(sha256, secret, utf8(`edgefl/enrolment/1\n${topic}\n${hex(key)}\n`));
}
