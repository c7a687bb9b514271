/** Who speaks: this device's own key, and the keys of the server that it listens to. */
import type { Store } from "../store/store";
import { fromHex, hex } from "../wire/digests";
import { MessageCounter, MessageSigner, unwrap, verified, type Envelope } from "../wire/envelope";
import { BundleError, IdentityError, DuplicateMessageError } from "../wire/errors";
import { FOREVER, keyPair, knownAfter, newSecret, sameStatement, shown, signsBundle, type Succession } from "../wire/keys";
import { type Kind, read, Round } from "../wire/messages";

const KEY = "device-key";
const NUMBERS = "numbers";
const TRUST = "server-keys";
const HEARD = "server-numbers";
const MOST_KEYS = 16;

/** What a device remembers of whom it follows: its first key of the server, and what followed from that. */
interface Trusted {
  first: string;
  statements: Succession[];
}

/** The number of the last message by topic and key, and which key signed the last announcement. */
interface LastNumbers {
  numbers: Record<string, Record<string, bigint>>;
  announcer: string;
}

/** This device's voice; its key is made at the first start. */
export async function speakerOf(store: Store): Promise<MessageSigner> {
  let secret = store.fact<Uint8Array>(KEY);
  if (secret === undefined) {
    secret = newSecret();
    await store.keepFact(KEY, secret);
  }
  // Where the disk is full, the clock keeps the next process ahead of this one.
  const save = (number: bigint) => void store.keepFact(NUMBERS, number).catch(() => undefined);
  return new MessageSigner(keyPair(secret), new MessageCounter(store.fact<bigint>(NUMBERS) ?? 0n, save));
}

export type Say = (event: "server-key", text: string) => void;

/** The keys of the server, and what it said last. `pinned` (hexadecimal): those that the device was given. */
export class ServerTrust {
  private trusted: Trusted;
  private readonly heard: LastNumbers;
  private known: Map<string, bigint>;
  private announced = false;
  private bare = false;

  constructor(
    private readonly store: Store,
    private readonly pinned: readonly string[],
    private readonly say: Say,
    private readonly now: () => number = Date.now,
  ) {
    this.trusted = store.fact<Trusted>(TRUST) ?? { first: "", statements: [] };
    this.heard = store.fact<LastNumbers>(HEARD) ?? { numbers: {}, announcer: "" };
    if (pinned.length && !pinned.includes(this.trusted.first)) {
      this.trusted = { ...this.trusted, first: pinned[0]! };
      this.keep();
    }
    this.known = this.knownNow();
  }

  /** Those that are good now. */
  get keys(): string[] {
    return [...this.known].filter(([, until]) => this.isBefore(until)).map(([key]) => key);
  }

  /** The server's message; IdentityError where it is not the server's word, or a copy (DuplicateMessageError). */
  open<T>(kind: Kind<T>, topic: string, payload: Uint8Array): T {
    const envelope = unwrap(payload, kind);
    if (envelope === null) return this.unsigned(kind, topic, payload);
    const learnt = this.admitted(kind, envelope);
    const message = verified(kind, topic, envelope);
    if (learnt) this.learn(learnt, envelope.key);
    if (this.known.size) this.inOrder(kind, topic, envelope);
    return message;
  }

  /** BundleError for a bundle that is not signed by a known key, where one is known. */
  checkBundle(sha256: string, signature: Uint8Array): void {
    const known = this.keys;
    if (!known.length || signsBundle(known, sha256, signature)) return;
    const flaw = signature.length ? "a wrong signature" : "no signature";
    throw new BundleError(
      `bundle ${sha256.slice(0, 12)} carries ${flaw} for the server key ${known.map(shown).join(", ")}: it is not loaded; ` +
        "give the device the key that the server prints, or find out who published this bundle",
    );
  }

  private isBefore(until: bigint): boolean {
    return BigInt(Math.floor(this.now() / 1000)) < until;
  }

  private unsigned<T>(kind: Kind<T>, topic: string, payload: Uint8Array): T {
    if (this.known.size) {
      throw new IdentityError(
        "unsigned",
        `a ${kind.name} on ${topic} is not signed, and this device knows the server's key: it is not acted on`,
      );
    }
    const message = read(kind, payload);
    if (!this.bare) {
      this.bare = true;
      this.say("server-key", "this server does not sign: whoever reaches the broker can be taken for it");
    }
    return message;
  }

  /** IdentityError unless the key is known, or becomes so: then what is to be remembered. */
  private admitted(kind: Kind<unknown>, envelope: Envelope): Trusted | null {
    const key = hex(envelope.key);
    const until = this.known.get(key);
    if (until !== undefined) {
      if (this.isBefore(until)) return null;
      throw new IdentityError("old-key", `server key ${shown(key)} was replaced and is not good any more`);
    }
    if (!this.known.size) return kind.name === Round.name ? { ...this.trusted, first: key } : null;
    if (knownAfter(this.known, envelope.succession).has(key)) {
      const fresh = envelope.succession.filter((each) => !this.trusted.statements.some((old) => sameStatement(old, each)));
      return { ...this.trusted, statements: [...this.trusted.statements, ...fresh] };
    }
    const known = [...this.known.keys()].map(shown).join(", ");
    throw new IdentityError(
      "unknown-key",
      `signed by server key ${key}, and this device knows ${known}: if the server was given a new key on purpose, start ` +
        "the device with it as server key; if not, somebody else speaks there",
    );
  }

  private learn(trusted: Trusted, key: Uint8Array): void {
    const first = !this.known.size;
    this.trusted = trusted;
    this.known = this.knownNow();
    this.keep();
    this.say("server-key", first
      ? `trust on first use: this device follows the server with the key ${hex(key)} from now on`
      : `the server has a new key ${hex(key)}, which its old one introduced`);
  }

  /** IdentityError for what the key said before something else, and for rounds of a key that another one followed. */
  private inOrder(kind: Kind<unknown>, topic: string, envelope: Envelope): void {
    const key = hex(envelope.key);
    const announces = kind.name === Round.name;
    if (announces && this.known.get(key) !== FOREVER) {
      throw new IdentityError("old-key", `server key ${shown(key)} was replaced and announces no rounds any more`);
    }
    const numbers = this.heard.numbers[topic] ?? {};
    const last = numbers[key] ?? -1n;
    if (envelope.at < last || (announces && envelope.at === last && key !== this.heard.announcer)) {
      throw new IdentityError(
        "replayed",
        `a ${kind.name} on ${topic} was said before, and something else after it: it is not acted on`,
      );
    }
    if (envelope.at === last && (this.announced || !announces)) throw new DuplicateMessageError(kind.name, topic);
    this.announced ||= announces;
    if (envelope.at > last) {
      const full = Object.keys(numbers).length >= MOST_KEYS;
      const kept = full ? Object.fromEntries(Object.entries(numbers).filter(([each]) => this.known.has(each))) : numbers;
      this.heard.numbers[topic] = { ...kept, [key]: envelope.at };
      if (announces) this.heard.announcer = key;
      void this.store.keepFact(HEARD, this.heard, false).catch(() => undefined);
    }
  }

  private knownNow(): Map<string, bigint> {
    const roots = this.pinned.length ? this.pinned : this.trusted.first ? [this.trusted.first] : [];
    return knownAfter(new Map(roots.map((key) => [hex(fromHex(key)), FOREVER])), this.trusted.statements);
  }

  private keep(): void {
    void this.store.keepFact(TRUST, this.trusted).catch(() => undefined);
  }
}
