/** Loading graphs, fetching the weights of units, and feeding ports: what the forward pass and training share. */
import type { Engine, LoadedGraph } from "../engine/base";
import type { Fetcher } from "../link/fetch";
import type { Job } from "../store/rows";
import { type Arr, sameShape } from "../wire/arrays";
import { BundleError, DataError } from "../wire/errors";
import { type Graph, inputsOf, labelOf, type Port } from "../wire/bundle/graphs";
import { graphOf, type Manifest } from "../wire/bundle/manifest";
import { patched, widened } from "../wire/patches";
import { type Arrays, load } from "../wire/tensors";
import type { RoundProfiler } from "./profiler";
import { lineOf } from "./job";

/** Where blobs come from. */
export type Blobs = Pick<Fetcher, "get" | "bring" | "read">;

export class GraphLoader {
  constructor(
    private readonly engine: Engine,
    private readonly manifest: Manifest,
    private readonly blobs: Blobs,
    private readonly costs: RoundProfiler,
  ) {}

  async load(name: string): Promise<LoadedGraph> {
    const graph = graphOf(this.manifest, name);
    const artifact = await this.blobs.get(graph.blob);
    return this.costs.timed("load", () => this.engine.load(graph, artifact));
  }

  /** The weights of some units, by global name. */
  async fetch(job: Job, units: readonly string[]): Promise<Arrays> {
    const missing = units.filter((unit) => !lineOf(job, unit).length);
    if (missing.length) {
      throw new BundleError(`round ${job.round} announces no weights for units ${missing.join(", ")}; export the bundle again`);
    }
    const all = units.flatMap((unit) => lineOf(job, unit));
    await this.blobs.bring(all);
    const weights: Arrays = Object.create(null);
    for (const unit of units) {
      const [first, ...patches] = lineOf(job, unit);
      let own = widened(load(await this.blobs.read(first!, all)));
      for (const patch of patches) own = patched(own, await this.blobs.read(patch, all));
      Object.assign(weights, own);
    }
    return weights;
  }

  /** The `weights` inputs of a graph; BundleError if one is missing or has another shape. */
  weightFeeds(graph: Graph, weights: Arrays): Arrays {
    const feeds: Arrays = {};
    for (const port of inputsOf(graph, "weights")) {
      const found = weights[labelOf(port)];
      if (found === undefined) {
        throw new BundleError(`graph '${graph.name}' wants '${labelOf(port)}', which the round's weights do not hold`);
      }
      feeds[port.name] = checkPort(port, found);
    }
    return feeds;
  }
}

/** The arrays of one role, by label. */
export function labelled(arrays: Arrays, role: string): Arrays {
  const found: Arrays = Object.create(null);
  for (const [name, array] of Object.entries(arrays)) {
    if (name.startsWith(`${role}.`)) found[name.slice(role.length + 1)] = array;
  }
  return found;
}

/** The array, if it is what the port takes. */
export function checkPort(port: Port, array: Arr): Arr {
  if (sameShape(array.shape, port.shape) && array.dtype === port.dtype) return array;
  const Kind = port.role === "batch" ? DataError : BundleError;
  throw new Kind(
    `${port.name} should be ${port.dtype} (${port.shape}), found ${array.dtype} (${array.shape}): the data or the weights do ` +
      "not belong to this bundle",
  );
}
