/** Which of the carries in a store a round goes on from, and which are void with what they belonged to. */
import type { StoredCarry } from "./rows";

/** `name` is that of the round's carries, `base` the last completed round. */
export interface RoundToBegin {
  run: string;
  name: string;
  round: number;
  base: number;
}

export interface VoidCarry {
  carry: StoredCarry;
  why: string;
}

export interface CarryChoice {
  carry: StoredCarry | null;
  void: VoidCarry[];
  superseded: StoredCarry[];
}

/** Judge `carries`, oldest first, for a round; one is good for `exchanges` completed rounds (0: for all). */
export function choose(carries: readonly StoredCarry[], begun: RoundToBegin, exchanges: number): CarryChoice {
  const gone = foreign(carries, begun.run).map((carry) => ({ carry, why: `it belongs to another run, ${begun.run} goes on now` }));
  const own = carries.filter((carry) => carry.name === begun.name);
  const lost = abandoned(own, begun.base, null);
  gone.push(...lost.map((carry) => ({ carry, why: `round ${carry.round} was abandoned` })));
  const valid = own.filter((carry) => !lost.includes(carry));
  const newest = valid.at(-1);
  if (newest && isTooOld(newest, begun.base, exchanges)) {
    const rounds = `${exchanges} completed round${exchanges > 1 ? "s" : ""}`;
    const why = `it was good for ${rounds} after it, and round ${begun.base} is completed`;
    return { carry: null, void: [...gone, { carry: newest, why }], superseded: valid.slice(0, -1) };
  }
  const settled = valid.map((carry, place) => (carry.waits ? -1 : place)).filter((place) => place >= 0);
  return { carry: newest ?? null, void: gone, superseded: valid.slice(0, settled.at(-1) ?? 0) };
}

/** Valid ones that the same run and program left in other tiers, oldest first. */
export function ofOtherTiers(carries: readonly StoredCarry[], begun: RoundToBegin, exchanges: number): StoredCarry[] {
  const program = (name: string) => name.slice(0, name.lastIndexOf("/"));
  return carries.filter((carry) =>
    carry.name !== begun.name && program(carry.name) === program(begun.name) &&
    carry.round <= begun.base && !isTooOld(carry, begun.base, exchanges));
}

/** Those of other runs: nothing ever asks for them again. */
export function foreign(carries: readonly StoredCarry[], run: string): StoredCarry[] {
  return carries.filter((carry) => !carry.name.startsWith(`${run}/`));
}

/** Those of rounds after the last completed one; with `before`, of rounds before that one only. */
export function abandoned(carries: readonly StoredCarry[], base: number, before: number | null): StoredCarry[] {
  return carries.filter((carry) => carry.round > base && (before === null || carry.round < before));
}

const isTooOld = (carry: StoredCarry, base: number, exchanges: number): boolean => exchanges > 0 && base - carry.round >= exchanges;
