/** What the store keeps between two lives of the agent. */
import type { BlobRef } from "../wire/blobs";
import type { Arr } from "../wire/arrays";

/** A task together with what the round's announcement says about its tier: enough to start, or to start again. */
export interface Job {
  run: string;
  round: number;
  tier: string;
  seed: bigint;
  nonce: string;
  samples: number;
  model_version: string;
  bundle: BlobRef;
  units: Record<string, BlobRef[]>;
  hyper: Record<string, number>;
  signature: Uint8Array;
  base: number;
  /** Of the graphs in `bundle`. */
  format: string;
  /** Lives of the agent that began to work on it. */
  tries: number;
  ask: boolean;
  progress_s: number;
  shard: number;
}

/** An update that waits for the server's word. `data` is an encoded Update. */
export interface Outgoing {
  run: string;
  round: number;
  nonce: string;
  data: Uint8Array;
  ask: boolean;
  shard: number;
}

/** One line of the device's history. */
export interface PastRound {
  run: string;
  round: number;
  tier: string;
  nonce: string;
  outcome: string;
  reason: string;
  text: string;
  loss: number;
}

/** Training state after `step` local steps; `basis` says what it began with beside the task. */
export interface Checkpoint {
  nonce: string;
  step: number;
  sums: Record<string, number>;
  basis: string;
  tensors: [string, Arr][];
}

/** A carry in the store. `name` is "<run>/<program>/<tier>"; `waits`: the server has not spoken on its update. */
export interface StoredCarry {
  id: number;
  name: string;
  nonce: string;
  round: number;
  waits: boolean;
}

export const DECLINED = "declined";
