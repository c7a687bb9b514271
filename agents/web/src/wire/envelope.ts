/** Signed messages: protocol version 2 is version 1 in an envelope. */
import { digestNow, joined, utf8 } from "./digests";
import { IdentityError, ProtocolError } from "./errors";
import { type KeyPair, PublicKey, Signature, Succession, verify } from "./keys";
import { type Kind, read, versionOf, written } from "./messages";
import { decode } from "./msgpack";
import { bytes, encoded, int, int64, list, omitted, type Read, required, struct } from "./schema";

export const SIGNED = 2;
const MOST_NUMBER = 1n << 62n;
const MOST_SUCCESSIONS = 8;

const Envelope = struct("Envelope", {
  v: required(int),
  key: required(PublicKey),
  at: required(int64),
  signature: required(Signature),
  body: required(bytes),
  succession: omitted(list(Succession), () => []),
});
export type Envelope = Read<typeof Envelope>;

function signedText(kind: Kind<unknown>, topic: string, at: bigint, body: Uint8Array): Uint8Array {
  return joined([utf8(`edgefl/${kind.context}/1\n${topic}\n${at}\n`), digestNow(body)]);
}

/** The envelope of a message in `payload`, unverified; null for a bare message. */
export function unwrap<T>(payload: Uint8Array, kind: Kind<T>): Envelope | null {
  const value = decode(payload);
  if (versionOf(kind.name, value) !== SIGNED) return null;
  const envelope = Envelope.read(value, "");
  if (envelope.at < 0n || envelope.at > MOST_NUMBER || envelope.succession.length > MOST_SUCCESSIONS) {
    throw new ProtocolError(`the envelope of a ${kind.name} is malformed: its number or succession is out of range`);
  }
  return envelope;
}

/** The message of `envelope`; IdentityError unless its signature holds for its key, this topic and kind. */
export function verified<T>(kind: Kind<T>, topic: string, envelope: Envelope): T {
  if (!verify(envelope.key, envelope.signature, signedText(kind, topic, envelope.at, envelope.body))) {
    throw new IdentityError(
      "wrong-signature",
      `the signature of a ${kind.name} on ${topic} does not hold: it was changed, or signed for another place`,
    );
  }
  return read(kind, envelope.body);
}

const BLOCK = 1n << 20n;

/** Numbers that grow, also over restarts: blocks of them are taken from what `save` keeps, and the clock keeps ahead. */
export class MessageCounter {
  private next_: bigint;
  private end: bigint;

  constructor(kept: bigint, private readonly save: (number: bigint) => void, now = Date.now) {
    const clock = BigInt(now()) * 1000n;
    this.next_ = this.end = kept > clock ? kept : clock;
  }

  /** The first of `count` numbers that are used by nobody else. */
  next(count = 1n): bigint {
    if (this.next_ + count > this.end) {
      this.end = this.next_ + count + BLOCK;
      this.save(this.end);
    }
    const number = this.next_;
    this.next_ += count;
    return number;
  }
}

/** Signs what this device says. */
export class MessageSigner {
  constructor(readonly keys: KeyPair, readonly numbers: MessageCounter) {}

  seal<T>(topic: string, kind: Kind<T>, message: T, at = this.numbers.next()): Uint8Array {
    const body = written(kind, message);
    const signature = this.keys.sign(signedText(kind as Kind<unknown>, topic, at, body));
    return encoded(Envelope, { v: SIGNED, key: this.keys.public, at, signature, body, succession: [] });
  }
}
