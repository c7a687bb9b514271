/** What the page's own server offers, and the secret that the scanned address holds behind its #. */

export interface OfferedTier {
  name: string;
  /** A device whose name begins with it belongs to the tier. */
  prefix: string;
  memory_bytes: number;
}

/** As `edgefl.web.offer.WebOffer` writes it. */
export interface Offer {
  federation: string;
  model: string;
  /** A WebSocket URL, or empty: through the page's own server. */
  broker: string;
  login: boolean;
  server_keys: string[];
  tiers: OfferedTier[];
  /** Rows of the sample; 0: there is none. */
  samples: number;
  photos: boolean;
  classes: string[];
  mirrors: string[];
}

export class OfferProblem extends Error {}

export function secretOf(hash: string): string {
  return hash.replace(/^#/, "");
}

/** The path of what is for those alone who have the secret. */
export function asked(path: string, secret: string, more: Record<string, string> = {}): string {
  return `${path}?${new URLSearchParams({ join: secret, ...more })}`;
}

export async function readOffer(secret: string): Promise<Offer> {
  if (secret === "") throw new OfferProblem("Scan the QR code that the terminal shows: its address lets this device in.");
  let answer: Response;
  try {
    answer = await fetch(asked("/api/offer", secret), { cache: "no-store" });
  } catch {
    throw new OfferProblem("The federation does not answer. Is this device on the same network, and does the run go on?");
  }
  if (answer.status === 403) throw new OfferProblem("This address is of another run. Scan the code in the terminal again.");
  if (!answer.ok) throw new OfferProblem(`The federation answered with ${answer.status}.`);
  return (await answer.json()) as Offer;
}

/** Where the agent finds the broker. */
export function brokerOf(offer: Offer, secret: string, at: Location): string {
  if (offer.broker !== "") return offer.broker;
  return `${at.protocol === "https:" ? "wss" : "ws"}://${at.host}${asked("/mqtt", secret)}`;
}
