/** What the round runner asks of an engine. State stays inside the engine between calls. */
import type { Arr } from "../wire/arrays";
import type { Graph } from "../wire/bundle/graphs";
import type { Arrays } from "../wire/tensors";

/** A tensor that an engine holds; opaque to everyone else. */
export type Held = object;
/** By port name (`state.weights.head.bias`). */
export type State = Map<string, Held>;

/** What a call returned: `state` still inside the engine, everything else as arrays by port name. */
export interface Outputs {
  state: State;
  arrays: Arrays;
}

export interface LoadedGraph {
  /**
   * Run once. `feeds` has every input that is not state; extra entries of `state` are passed over. What of `state` the
   * graph rewrites is used up by this run.
   */
  run(feeds: Arrays, state: State): Promise<Outputs>;
  /** Give its memory back. */
  release(): void;
}

export interface Engine {
  readonly name: string;
  readonly version: string;
  readonly format: "onnx";
  /** Make an artifact runnable; BundleError if it is damaged or its ports differ from the manifest. */
  load(graph: Graph, artifact: Uint8Array): Promise<LoadedGraph>;
  /** A copy of one tensor, for a checkpoint. */
  read(held: Held): Promise<Arr>;
  /** The inverse of `read`. */
  write(array: Arr): Promise<Held>;
  /** Let go of tensors that no graph reads any more. */
  drop(state: State): void;
  /** Bytes that the engine holds now. */
  bytes(): number;
  /** Give all memory back: nothing that was loaded or written is of use after it. */
  rest(): void;
}
