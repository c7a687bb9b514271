/** A graph in segments: artifacts that run one after another as if they were one. Pages wait in memory between two. */
import type { Graph } from "../wire/bundle/graphs";
import type { Arrays } from "../wire/tensors";
import type { LoadedGraph, Outputs, State } from "./base";

/** A segment that is loaded, and its ports. */
export interface LoadedSegment extends LoadedGraph {
  readonly graph: Graph;
}

export class SegmentedGraph implements LoadedGraph {
  constructor(private readonly parts: readonly LoadedSegment[]) {}

  /** Every segment reads the state that the run began with. */
  async run(feeds: Arrays, state: State): Promise<Outputs> {
    const later: State = new Map();
    const arrays: Arrays = {};
    const pages: Arrays = {};
    for (const [place, part] of this.parts.entries()) {
      const outputs = await part.run({ ...feeds, ...pages }, state);
      for (const [name, held] of outputs.state) later.set(name, held);
      for (const [name, array] of Object.entries(outputs.arrays)) {
        if (name.startsWith("page.")) pages[name] = array;
        else arrays[name] = array;
      }
      this.forget(pages, place);
    }
    return { state: later, arrays };
  }

  /** Drop the pages that no segment after `place` reads. */
  private forget(pages: Arrays, place: number): void {
    const wanted = new Set(this.parts.slice(place + 1).flatMap((part) => part.graph.inputs.map((port) => port.name)));
    for (const name of Object.keys(pages)) if (!wanted.has(name)) delete pages[name];
  }

  release(): void {
    for (const part of this.parts) part.release();
  }
}
