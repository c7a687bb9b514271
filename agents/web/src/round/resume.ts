/** Taking up what an earlier round left: checked against the graphs, and what is of no use is dropped after it was told. */
import { abandoned, type CarryChoice, choose, foreign, ofOtherTiers, type RoundToBegin, type VoidCarry } from "../store/carries";
import type { Job, StoredCarry } from "../store/rows";
import type { Store } from "../store/store";
import { BundleError, ProtocolError, RoundDeclined } from "../wire/errors";
import { inputsOf, labelOf, type Port } from "../wire/bundle/graphs";
import { graphOf, type Manifest } from "../wire/bundle/manifest";
import type { Round } from "../wire/messages";
import { type Arrays, load } from "../wire/tensors";
import { checkPort } from "./graph_loader";

export type Tell = (text: string, carry: StoredCarry) => void;

/** What a round goes on from; nothing of it is zeros. `origin` names the round that left it. */
export interface RestoredCarry {
  arrays: Arrays;
  origin: string;
}

export const carryName = (job: Job, manifest: Manifest): string => `${job.run}/${manifest.program}/${job.tier}`;

/** What the round goes on from; RoundDeclined if nothing is there and the program cannot begin without it. */
export async function takeUp(store: Store, job: Job, manifest: Manifest, tell: Tell): Promise<RestoredCarry> {
  const ports = carryPorts(manifest);
  const carries = store.carries();
  const begun = { run: job.run, name: carryName(job, manifest), round: job.round, base: job.base };
  const choice = choiceOf(carries, begun, manifest, ports.length > 0);
  const carry = choice.carry;
  const [own, why] = carry ? await readCarry(store, carry, ports) : [{ arrays: {}, origin: "" }, ""];
  if (own === null) return takeUp(store, job, manifest, tell); // refused by the server a moment ago
  const misfit: VoidCarry[] = carry && why ? [{ carry, why }] : [];
  let start = own;
  if (ports.length && manifest.carry_any_tier) {
    const after = carry && !isNothing(own) ? carry.id : 0;
    for (const each of ofOtherTiers(carries, begun, manifest.carry_exchanges).reverse()) {
      const [other] = each.id > after ? await readCarry(store, each, ports) : [null];
      if (other === null || isNothing(other)) continue; // it stays for a return to its tier
      start = other;
      break;
    }
  }
  const isEmpty = isNothing(start);
  const declines = manifest.carry_needed && ports.length > 0 && isEmpty;
  const whatNow = declines ? `this device declines round ${job.round}`
    : !ports.length ? `round ${job.round} asks for nothing of earlier ones`
      : isEmpty ? `round ${job.round} begins from zeros` : `round ${job.round} goes on from what was kept ${start.origin}`;
  await drop(store, choice, misfit, tell, whatNow);
  if (declines) {
    const lost = [...choice.void, ...misfit].at(-1);
    throw new RoundDeclined(
      "no-carry",
      `program '${manifest.program}' goes on from what a device kept of an earlier round, and this one has nothing that ` +
        `round ${job.round} can go on from${lost ? `: ${lost.why}` : ""}`,
    );
  }
  return start;
}

/** Drop what the device kept of rounds between the last completed one and the one that is announced. */
export async function dropAbandoned(store: Store, announced: Round, tell: Tell): Promise<void> {
  if (announced.state !== "open") return;
  const own = store.carries().filter((carry) => carry.name.startsWith(`${announced.run}/`));
  const lost = abandoned(own, announced.base, announced.round);
  const gone = lost.map((carry) => ({ carry, why: `round ${carry.round} was abandoned` }));
  await drop(store, { carry: null, void: gone, superseded: [] }, [], tell, "later rounds go on from what was kept before it");
}

/** What the graphs of a round read of an earlier one. */
export function carryPorts(manifest: Manifest): Port[] {
  const names = new Set([manifest.start, ...manifest.phases.map((phase) => phase.graph), manifest.finish]);
  return [...names].flatMap((name) => inputsOf(graphOf(manifest, name), "carry"));
}

const isNothing = (carry: RestoredCarry): boolean => !Object.keys(carry.arrays).length;

function choiceOf(carries: readonly StoredCarry[], begun: RoundToBegin, manifest: Manifest, reads: boolean): CarryChoice {
  const choice = choose(carries, begun, manifest.carry_exchanges);
  if (reads) return choice;
  const others = foreign(carries, begun.run); // a later round may ask for those of this run
  return { carry: null, void: choice.void.filter((each) => others.includes(each.carry)), superseded: [] };
}

/** The tensors of a carry, or why they do not fit; null if it is not there any more. */
async function readCarry(store: Store, carry: StoredCarry, ports: readonly Port[]): Promise<[RestoredCarry | null, string]> {
  const data = await store.carry(carry);
  if (data === null) return [null, ""];
  const nothing = { arrays: {}, origin: "" };
  try {
    const arrays = load(data);
    const missing = ports.filter((port) => !(labelOf(port) in arrays)).map(labelOf);
    if (missing.length) return [nothing, `the program now reads ${missing.join(", ")}, which it does not hold`];
    for (const port of ports) checkPort(port, arrays[labelOf(port)]!);
    return [{ arrays, origin: `${ofRound(carry)} (task ${carry.nonce})` }, ""];
  } catch (error) {
    if (error instanceof ProtocolError || error instanceof BundleError) return [nothing, error.message];
    throw error;
  }
}

/** Tell of what is void, then drop it: an agent killed in between tells it twice. */
async function drop(store: Store, choice: CarryChoice, misfit: readonly VoidCarry[], tell: Tell, whatNow: string): Promise<void> {
  const gone = [...choice.void, ...misfit];
  const told = new Map(gone.map((each) => [`${each.carry.name} ${each.why}`, each]));
  for (const each of told.values()) {
    tell(`what this device kept ${ofRound(each.carry)} is dropped: ${each.why}; ${whatNow}`, each.carry);
  }
  const ids = new Set([...gone.map((each) => each.carry), ...choice.superseded].map((carry) => carry.id));
  // Where one does not fit, those before it fit no better.
  const useless = store.carries().filter((carry) => ids.has(carry.id) || carry.name === misfit[0]?.carry.name);
  if (useless.length) await store.dropCarries(useless);
}

function ofRound(carry: StoredCarry): string {
  return `of round ${carry.round} of run ${carry.name.split("/", 1)[0]}`;
}
