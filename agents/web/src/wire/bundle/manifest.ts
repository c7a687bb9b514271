/** The manifest: what a tier downloads, graph by graph, and how the runtime is to call it. It names no method. */
import { isDtype } from "../arrays";
import { BlobRef } from "../blobs";
import { BundleError, ProtocolError } from "../errors";
import { checkGraph, Graph, inputsOf, isPrintable, labelOf } from "./graphs";
import { VERSION, versionOf } from "../messages";
import { decode } from "../msgpack";
import { problemOf, Reader } from "./readers";
import { bool, dict, either, float, int, int64, list, nullable, omitted, oneOf, type Read, required, str, struct, unset } from "../schema";

/** The version of a manifest that has a graph in segments. */
const SEGMENTED = 3;
/** That of one that has a graph with planned outputs. */
const PLANNED = 4;
/** The version of a manifest with a split; it may also have segments and planned outputs. */
const HELD_OUT = 5;
/** What every batch may have; other parts are inputs beside x. */
const PARTS = ["x", "y", "mask", "sample"];

const Chunk = struct("Chunk", { units: required(list(str)), graph: required(str) });
const Bucket = struct("Bucket", { length: required(int), graph: required(str) });
const Phase = struct("Phase", {
  name: required(str),
  graph: required(str),
  steps: required(int),
  over_data: omitted(bool, () => false),
  shorter: omitted(list(Bucket), () => []),
});
export type Phase = Read<typeof Phase>;

const Input = struct("Input", {
  name: required(str),
  shape: required(list(int)),
  dtype: required(str),
  below: omitted(int, () => 0),
});
export type Input = Read<typeof Input>;

const DataSpec = struct("DataSpec", {
  shape: required(list(int)),
  dtype: required(str),
  classes: required(int),
  scale: either(float, () => 1),
  shift: either(float, () => 0),
  below: omitted(int, () => 0),
  others: omitted(list(Input), () => []),
  names: omitted(list(str), () => []),
  reader: omitted(nullable(Reader), () => null),
});
export type DataSpec = Read<typeof DataSpec>;

const Split = struct("Split", { share: required(float), seed: required(int64), part: required(oneOf("train", "held-out")) });
/** Division of the local rows, and the part that a bundle uses. */
export type Split = Read<typeof Split>;

export const Manifest = struct("Manifest", {
  v: either(int, () => VERSION),
  model: required(str),
  program: required(str),
  tier: required(str),
  parameters: required(int),
  data: required(DataSpec),
  batch: required(int),
  prefix: required(list(Chunk)),
  suffix: required(list(str)),
  start: required(str),
  phases: required(list(Phase)),
  finish: required(str),
  evaluate: required(str),
  hyper: required(dict(float)),
  graphs: required(list(Graph)),
  codec: required(str),
  codec_version: required(int),
  draws: required(oneOf("walk", "draw", "length")),
  personalize: either(str, () => ""),
  exchange: either(str, () => ""),
  carry_exchanges: either(int, () => 0),
  carry_needed: either(bool, () => false),
  carry_any_tier: omitted(bool, () => false),
  sources: either(nullable(BlobRef), () => null),
  split: unset(Split),
});
export type Manifest = Read<typeof Manifest>;

/** The manifest in `data`; BundleError if it is malformed, of another version, or inconsistent. */
export function decodeManifest(data: Uint8Array): Manifest {
  let manifest: Manifest;
  try {
    const value = decode(data);
    const version = versionOf("Manifest", value);
    if (![VERSION, SEGMENTED, PLANNED, HELD_OUT].includes(version)) {
      throw new BundleError(
        `the manifest has version ${version}, this runtime reads ${VERSION}, ${SEGMENTED}, ${PLANNED} and ${HELD_OUT}: ` +
          "install a matching edgefl",
      );
    }
    manifest = Manifest.read(value, "");
  } catch (error) {
    if (!(error instanceof ProtocolError)) throw error;
    throw new BundleError(`the manifest is malformed: ${error.message}; export the bundle again`);
  }
  check(manifest);
  return manifest;
}

export function graphOf(manifest: Manifest, name: string): Graph {
  const found = manifest.graphs.find((graph) => graph.name === name);
  if (found) return found;
  throw new BundleError(`the manifest names graph '${name}' but does not list it; export the bundle again`);
}

/** The graphs that a round runs. */
export function graphsOfRound(manifest: Manifest): Graph[] {
  const phases = manifest.phases.flatMap((phase) => [phase.graph, ...phase.shorter.map((bucket) => bucket.graph)]);
  const names = [...manifest.prefix.map((chunk) => chunk.graph), manifest.start, ...phases, manifest.finish];
  return [...new Set(names)].map((name) => graphOf(manifest, name));
}

/** All that a bundle's file holds. */
export function blobsOf(manifest: Manifest): BlobRef[] {
  const graphs = manifest.graphs.flatMap((graph) => [graph.blob, ...graph.variants.map((variant) => variant.blob)]);
  const tokenizer = manifest.data.reader?.kind === "text" ? manifest.data.reader.tokenizer : null;
  return [...graphs, ...[manifest.sources, tokenizer].filter((ref) => ref !== null)];
}

/** Rows of each step of a phase over the data. */
export function passRows(manifest: Manifest, phase: Phase): number {
  const port = inputsOf(graphOf(manifest, phase.graph), "batch").find((each) => labelOf(each) === "0.x");
  if (port?.shape[0]) return port.shape[0];
  throw new BundleError(
    `phase '${phase.name}' passes over the data, and graph '${phase.graph}' reads no rows of them as 'batch.0.x'; export ` +
      "the bundle again",
  );
}

/** Local steps of each phase on a device that has so many samples. */
export function stepsWith(manifest: Manifest, samples: number): number[] {
  return manifest.phases.map((phase) =>
    phase.over_data ? Math.ceil(samples / passRows(manifest, phase)) : phase.steps);
}

function check(manifest: Manifest): void {
  const again = "; export the bundle again";
  graphsOfRound(manifest);
  for (const name of [manifest.evaluate, ...(manifest.personalize ? [manifest.personalize] : [])]) graphOf(manifest, name);
  for (const phase of manifest.phases) {
    const lengths = phase.shorter.map((bucket) => bucket.length);
    if (lengths.some((length, place) => length <= (place ? lengths[place - 1]! : 0))) {
      throw new BundleError(`phase '${phase.name}' has graphs for the lengths ${lengths}, which should ascend from 1 on${again}`);
    }
    if (phase.over_data) passRows(manifest, phase);
  }
  for (const graph of manifest.graphs) {
    checkGraph(graph);
    if (graph.segments.length && ![SEGMENTED, HELD_OUT].includes(manifest.v)) {
      throw new BundleError(`graph '${graph.name}' has segments in a manifest of version ${manifest.v}, which is ${SEGMENTED} then${again}`);
    }
    if (graph.planned_outputs && ![PLANNED, HELD_OUT].includes(manifest.v)) {
      throw new BundleError(`graph '${graph.name}' has planned outputs in a manifest of version ${manifest.v}, which is ${PLANNED} then${again}`);
    }
  }
  const split = manifest.split;
  if ((split !== undefined) !== (manifest.v === HELD_OUT)) {
    throw new BundleError(
      `tier '${manifest.tier}' divides the rows by version ${manifest.v} of a manifest, which is ${HELD_OUT} then and only then${again}`,
    );
  }
  if (split && !(split.share > 0 && split.share < 1 && split.seed >= 0n)) {
    throw new BundleError(`a split has a share between 0 and 1 and a seed of at least 0, found ${split.share} and ${split.seed}${again}`);
  }
  const others = manifest.data.others.map((each) => each.name);
  if (new Set([...others, ...PARTS]).size < others.length + PARTS.length) {
    throw new BundleError(`the inputs beside x are called ${others.join(", ")}: each has a name of its own${again}`);
  }
  checkData(manifest.data, again);
  if (manifest.data.reader?.kind === "sound" && manifest.data.reader.features) graphOf(manifest, manifest.data.reader.features);
  const shown = [manifest.model, manifest.program, manifest.tier, manifest.exchange, ...others, ...manifest.data.names];
  const hidden = [...shown, ...manifest.graphs.map((graph) => graph.name)].find((name) => !isPrintable(name));
  if (hidden !== undefined) throw new BundleError(`the name ${JSON.stringify(hidden)} in a manifest cannot be shown${again}`);
  if (manifest.batch <= 0 || manifest.phases.some((phase) => phase.steps < 0)) {
    throw new BundleError(`batch and steps of a manifest must be positive${again}`);
  }
  if (manifest.carry_exchanges < 0) {
    throw new BundleError(`a carry cannot be good for ${manifest.carry_exchanges} rounds${again}`);
  }
}

function checkData(data: DataSpec, again: string): void {
  if (!isDtype(data.dtype) || data.others.some((each) => !isDtype(each.dtype))) {
    throw new BundleError(`samples of type ${data.dtype} cannot be read${again}`);
  }
  const different = new Set(data.names).size;
  if (data.names.length && (different !== data.names.length || different !== data.classes)) {
    throw new BundleError(`the data have ${data.classes} classes and ${different} different names for them${again}`);
  }
  const problem = data.reader === null ? "" : problemOf(data.reader);
  if (problem) throw new BundleError(`the reader of a manifest cannot be used: ${problem}${again}`);
}
