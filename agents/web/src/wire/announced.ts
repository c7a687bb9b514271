/** What an announcement says of its rounds. */
import { ProtocolError } from "./errors";
import { type Offer, Page, type Round } from "./messages";
import { decoded } from "./schema";

/** What is announced of round `number`; null if it takes no updates. */
export function at(round: Round, number: number): Round | null {
  if (round.state !== "open" || number === round.round) return round.state === "open" ? round : null;
  const live = round.live.get(number);
  return live === undefined ? null : { ...round, round: number, ...live };
}

/** The rounds that take updates. */
export function takes(round: Round): number[] {
  if (round.state !== "open") return [];
  return [...[...round.live.keys()].sort((one, other) => one - other), round.round];
}

/** What the round offers in a format; empty if that is nothing. */
export function offerOf(round: Round, format: string): Offer {
  return round.offers[format] ?? { bundles: {}, signatures: {} };
}

/** The formats in which a tier is offered, by name. */
export function formatsOf(round: Round, tier: string): string[] {
  return Object.keys(round.offers).filter((name) => tier in round.offers[name]!.bundles).sort();
}

/** With the part that `pages` names, whose bytes have been checked. */
export function whole(round: Round, page: Uint8Array): Round {
  let read;
  try {
    read = decoded(Page, page);
  } catch (error) {
    if (!(error instanceof ProtocolError)) throw error;
    throw new ProtocolError(`the page of the announcement of round ${round.round} is malformed: ${error.message}`);
  }
  const live = new Map([...round.live].map(([number, each]) => [number, { ...each, units: read.live.get(number) ?? {} }]));
  return { ...round, offers: read.offers, units: read.units, live, pages: null };
}
