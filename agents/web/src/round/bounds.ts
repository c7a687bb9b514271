/** What a round may ask of a device, checked before anything of it is fetched, unfolded or loaded. */
import type { Engine } from "../engine/base";
import type { Job } from "../store/rows";
import type { BlobRef } from "../wire/blobs";
import { RoundDeclined } from "../wire/errors";
import { type Graph, inputsOf, type Port, portBytes } from "../wire/bundle/graphs";
import { isOlder } from "../wire/bundle/releases";
import type { Limits } from "../wire/limits";
import { blobsOf, graphsOfRound, type Manifest, stepsWith } from "../wire/bundle/manifest";
import { lineOf } from "./job";

/** What any device is trusted to have: small offers are about a graph's own memory. */
const LEAST_BYTES = 32 << 20;
/** A unit's blob may hold more than one graph reads. */
const SLACK = 2;

export const mebibytes = (bytes: number): string => `${(bytes / 2 ** 20).toFixed(1)} MiB`;

/** RoundDeclined if the manifest itself is too large to be read. */
export function checkManifestRef(ref: BlobRef, limits: Limits): void {
  check([ref], limits.max_manifest_bytes, "its manifest", "raise limits.max_manifest_bytes");
}

/** Throw RoundDeclined if a graph of the bundle needs a newer release of the engine's runtime than this page has. */
export function checkRuntime(manifest: Manifest, engine: Engine): void {
  const needed = manifest.graphs.find((graph) => graph.least_runtime && isOlder(engine.version, graph.least_runtime));
  if (!needed) return;
  throw new RoundDeclined(
    "no-format",
    `expected ${engine.name} ${needed.least_runtime} or newer for tier '${manifest.tier}', found ${engine.version}; build this ` +
      "page with that release",
  );
}

/** RoundDeclined if a bundle's blobs, or what a graph of the round reads or is known to need, is more than is offered. */
export function checkMemory(manifest: Manifest, memoryBytes: number): void {
  const most = Math.max(memoryBytes, LEAST_BYTES);
  const remedy = "give it more memory, or a tier that needs less";
  check(blobsOf(manifest), most, "a blob of the bundle", remedy);
  for (const graph of graphsOfRound(manifest)) {
    for (const [what, ports] of [["reads", graph.inputs], ["gives", graph.outputs]] as const) {
      const needed = sumOf(ports);
      if (needed > most) {
        throw noMemory(`graph '${graph.name}' ${what} ${mebibytes(needed)} at once, and this device offers ${mebibytes(memoryBytes)}: ${remedy}`);
      }
    }
    const planned = graph.planned_bytes && graph.planned_bytes + pageBytes(graph);
    if (planned > memoryBytes) {
      throw noMemory(
        `graph '${graph.name}' of tier '${manifest.tier}' needs ${mebibytes(planned)}, and this device offers ` +
          `${mebibytes(memoryBytes)}: ${remedy}`,
      );
    }
  }
}

/** Pages stay in memory here, and are counted in `planned_bytes` only while they are read or left. */
function pageBytes(graph: Graph): number {
  return sumOf(graph.segments.flatMap((segment) => segment.outputs.filter((port) => port.role === "page")));
}

/** RoundDeclined if a blob of weights unfolds to more than the graphs of the round could read of it. */
export function checkWeights(job: Job, manifest: Manifest): void {
  const read = Math.max(0, ...graphsOfRound(manifest).map((graph) => sumOf(inputsOf(graph, "weights"))));
  const units = [...manifest.suffix, ...manifest.prefix.flatMap((chunk) => chunk.units)];
  const refs = units.flatMap((unit) => lineOf(job, unit));
  check(refs, SLACK * read + 2 ** 20, "a blob of weights", "have the server publish what the bundle reads");
}

/** RoundDeclined if the round has more steps than the device makes. */
export function checkWork(manifest: Manifest, rows: number, limits: Limits): void {
  const steps = stepsWith(manifest, rows).reduce((sum, each) => sum + each, 0);
  if (steps <= limits.max_steps) return;
  throw new RoundDeclined(
    "too-much-work",
    `the round has ${steps} local steps, and this device makes ${limits.max_steps} at most: raise limits.max_steps, or have ` +
      "the server ask for fewer",
  );
}

function check(refs: readonly BlobRef[], most: number, what: string, remedy: string): void {
  for (const ref of refs) {
    const unfolded = Math.max(ref.size, ref.raw);
    if (unfolded > most) {
      throw noMemory(`${what} (${ref.sha256.slice(0, 12)}) has ${mebibytes(unfolded)} where at most ${mebibytes(most)} are of use: ${remedy}`);
    }
  }
}

const noMemory = (text: string): RoundDeclined => new RoundDeclined("no-memory", text);

const sumOf = (ports: readonly Port[]): number => ports.reduce((sum, port) => sum + portBytes(port), 0);
