/** A graph as a manifest tells it: one artifact or several segments, and the ports by which a device calls it. */
import { bytesOf, isDtype } from "../arrays";
import { packedBytes } from "../bits";
import { BlobRef, SHA256 } from "../blobs";
import { BundleError } from "../errors";
import { Float, decode } from "../msgpack";
import { bool, either, int, list, nullable, omitted, oneOf, type Read, required, str, struct } from "../schema";
import { isRelease } from "./releases";

export const ROLES = [
  "weights", "state", "carry", "batch", "data", "noise", "hyper", "update", "metric", "record", "page",
] as const;
export type Role = (typeof ROLES)[number];

const MOST_VARIANTS = 8;
const SEGMENTS = "edgefl-segments";

export const Port = struct("Port", {
  name: required(str),
  role: required(oneOf(...ROLES)),
  dtype: required(str),
  shape: required(list(int)),
  mask: omitted(int, () => 0),
  ignored: omitted(nullable(int), () => null),
});
export type Port = Read<typeof Port>;

const Segment = struct("Segment", {
  inputs: required(list(Port)),
  outputs: required(list(Port)),
  in_place: omitted(list(str), () => []),
});

const Variant = struct("Variant", {
  name: required(str),
  blob: required(BlobRef),
  raw: required(int),
  sha256: required(str),
});

export const Graph = struct("Graph", {
  name: required(str),
  format: required(oneOf("onnx", "executorch")),
  blob: required(BlobRef),
  inputs: required(list(Port)),
  outputs: required(list(Port)),
  memory_budget: omitted(int, () => 0),
  planned_bytes: omitted(int, () => 0),
  in_place: omitted(list(str), () => []),
  metrics: omitted(list(str), () => []),
  activations: either(oneOf("float32", "float16"), () => "float32" as const),
  variants: omitted(list(Variant), () => []),
  segments: omitted(list(Segment), () => []),
  planned_outputs: omitted(bool, () => false),
  least_runtime: omitted(str, () => ""),
});
export type Graph = Read<typeof Graph>;

/** The name without its role: `weights.head.bias` -> `head.bias`. */
export function labelOf(port: Port): string {
  return port.name.slice(port.name.indexOf(".") + 1);
}

export const inputsOf = (graph: Graph, role: Role): Port[] => graph.inputs.filter((port) => port.role === role);
export const outputsOf = (graph: Graph, role: Role): Port[] => graph.outputs.filter((port) => port.role === role);

export const portBytes = (port: Port): number => bytesOf(port);

/** Whether people can be shown a name: no control characters, nothing that changes what stands beside it. */
export const isPrintable = (name: string): boolean => !/[\p{Cc}\p{Cf}\p{Co}\p{Cs}\p{Zl}\p{Zp}]/u.test(name);

export function checkGraph(graph: Graph): void {
  const again = "; export the bundle again";
  for (const ports of [graph.inputs, graph.outputs]) {
    const twice = twiceIn(ports.map((port) => port.name));
    if (twice) throw new BundleError(`graph '${graph.name}' has port '${twice}' twice${again}`);
  }
  const ports = [graph, ...graph.segments].flatMap((part) => [...part.inputs, ...part.outputs]);
  const odd = ports.find((port) => !isConsistent(port));
  if (odd) throw new BundleError(`port '${odd.name}' of graph '${graph.name}' is inconsistent${again}`);
  const rewritten = graph.inputs.filter((port) => port.role === "state" && has(graph.outputs, port)).map((port) => port.name);
  const wrong = graph.in_place.find((name) => !rewritten.includes(name));
  if (wrong) {
    throw new BundleError(
      `graph '${graph.name}' is to write '${wrong}' in place, which it does not read and return as one state port${again}`,
    );
  }
  const names = graph.variants.map((variant) => variant.name);
  const unsound = graph.variants.some((each) =>
    !each.name || !isPrintable(each.name) || each.raw <= 0 || each.blob.codec || !SHA256.test(each.sha256));
  if (unsound || names.length > MOST_VARIANTS || twiceIn(names)) {
    throw new BundleError(`the variants of graph '${graph.name}' are inconsistent${again}`);
  }
  if (graph.least_runtime && !isRelease(graph.least_runtime)) {
    throw new BundleError(`graph '${graph.name}' needs release '${graph.least_runtime}' of its runtime${again}`);
  }
  if (graph.planned_bytes < 0) {
    throw new BundleError(`graph '${graph.name}' is planned to need ${graph.planned_bytes} bytes${again}`);
  }
  if (graph.planned_outputs && (graph.format !== "executorch" || graph.segments.length)) {
    throw new BundleError(
      `graph '${graph.name}' has planned outputs, which only a program of format executorch has, and none in segments${again}`,
    );
  }
  const problem = disorderOf(graph);
  if (problem) throw new BundleError(`the segments of graph '${graph.name}' do not fit together: ${problem}${again}`);
}

function twiceIn(names: string[]): string {
  return names.find((name, place) => names.indexOf(name) < place) ?? "";
}

function isConsistent(port: Port): boolean {
  if (port.mask && (port.dtype !== "uint8" || port.shape.length !== 1 || port.shape[0] !== packedBytes(port.mask))) return false;
  const named = port.name.split(".", 1)[0] === port.role;
  const numbered = port.role !== "batch" || /^[0-9]{1,3}\../.test(labelOf(port));
  return named && numbered && isDtype(port.dtype) && port.shape.every((extent) => extent >= 0);
}

function key(port: Port): string {
  return JSON.stringify([port.name, port.role, port.dtype, port.shape, port.mask, port.ignored]);
}

function has(ports: readonly Port[], port: Port): boolean {
  return ports.some((each) => key(each) === key(port));
}

/** Why the segments of a graph, run in their order, are not the graph; "" if they are. */
function disorderOf(graph: Graph): string {
  if (!graph.segments.length) {
    const page = [...graph.inputs, ...graph.outputs].find((port) => port.role === "page");
    return page ? `it has none, and the port '${page.name}'` : "";
  }
  const made: Port[] = [];
  const rewritten = new Set<string>();
  for (const segment of graph.segments) {
    const twice = twiceIn(segment.inputs.map((port) => port.name)) || twiceIn(segment.outputs.map((port) => port.name));
    if (twice) return `one has '${twice}' twice`;
    for (const port of segment.inputs) {
      if (!has(graph.inputs, port) && !has(made, port)) {
        return `one reads '${port.name}', which neither the graph has nor an earlier one leaves`;
      }
      if (rewritten.has(port.name)) return `one reads '${port.name}', which an earlier one has written over`;
    }
    for (const port of segment.outputs) {
      if (made.some((each) => each.name === port.name)) return `two leave '${port.name}'`;
      if (port.role !== "page" && !has(graph.outputs, port)) return `one leaves '${port.name}', which is no output of the graph`;
    }
    for (const name of segment.in_place) {
      const rewrites = segment.inputs.some((port) => port.name === name && has(segment.outputs, port));
      if (!rewrites || !graph.in_place.includes(name)) return `one is to write '${name}' in place, which it or the graph does not`;
      rewritten.add(name);
    }
    made.push(...segment.outputs);
  }
  const left = graph.outputs.find((port) => !has(made, port));
  return left ? `none leaves '${left.name}'` : "";
}

/** The artifacts of a graph in segments; BundleError if `data` is no such blob. */
export function artifactsOf(graph: Graph, data: Uint8Array): Uint8Array[] {
  const value = decode(data);
  const listed = Array.isArray(value) && value.length === 2 && value[0] === SEGMENTS ? value[1] : null;
  if (!Array.isArray(listed) || !listed.every((each) => each instanceof Uint8Array && !(each instanceof Float))) {
    throw new BundleError("a blob that should hold the segments of a graph holds something else; export the bundle again");
  }
  if (listed.length !== graph.segments.length) {
    throw new BundleError(
      `graph '${graph.name}' has ${graph.segments.length} segments in its manifest and ${listed.length} in its blob; export ` +
        "the bundle again",
    );
  }
  return listed as Uint8Array[];
}

/** The graph of one segment. */
export function segmentOf(graph: Graph, place: number): Graph {
  const { inputs, outputs, in_place } = graph.segments[place]!;
  return { ...graph, inputs, outputs, in_place, segments: [] };
}
