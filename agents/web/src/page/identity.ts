/** Who this device is and what its owner chose last: kept in the browser, for each federation. */
import type { OfferedTier } from "./offer";

export interface Choices {
  id: string;
  tier: string;
  data: "sample" | "photos" | "file";
  memory: number;
  threads: number;
  pauseHidden: boolean;
  /** Whether it joined and did not leave: a page that is loaded again then goes on by itself. */
  joined: boolean;
}

const DIGITS = 6;

export function readChoices(federation: string): Choices | null {
  try {
    return JSON.parse(localStorage.getItem(key(federation)) ?? "null") as Choices | null;
  } catch {
    return null; // of another release, or storage is refused
  }
}

export function keepChoices(federation: string, choices: Choices): void {
  try {
    localStorage.setItem(key(federation), JSON.stringify(choices));
  } catch {
    // A private window may refuse: the next visit is then a new device.
  }
}

/** A new name of the tier: `weak-web-3f9a2c`. */
export function newName(tier: OfferedTier | undefined): string {
  const drawn = crypto.getRandomValues(new Uint8Array(DIGITS));
  const digits = [...drawn].map((byte) => (byte & 15).toString(16)).join("");
  return `${tier?.prefix ?? "web-"}${digits}`;
}

/** `name` as one of another tier: the digits stay. */
export function renamed(name: string, tiers: OfferedTier[], tier: OfferedTier | undefined): string {
  const old = tiers.find((each) => name.startsWith(each.prefix));
  const own = old ? name.slice(old.prefix.length) : name.replace(/^.*web-/, "");
  return `${tier?.prefix ?? "web-"}${own}`;
}

function key(federation: string): string {
  return `edgefl/${federation}`;
}
