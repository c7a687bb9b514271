/** What feeds the ports of a graph, by role: batches, facts about the data, scalars and noise. Weights: ./graphs. */
import { type Draws, Batches, noise, passed, passMask } from "../data/batches";
import type { FittedData, Rows } from "../data/samples";
import { type Arr, type Dtype, sizeOf, zeros } from "../wire/arrays";
import { BundleError } from "../wire/errors";
import { type Graph, inputsOf, labelOf, type Port } from "../wire/bundle/graphs";
import type { Arrays } from "../wire/tensors";
import { checkPort } from "./graph_loader";

/** What the first trained unit reads of rows, where units before it have seen them already. */
export type Features = (rows: Rows) => Promise<Arr>;

export class RoundInputs {
  private readonly drawn = new Map<number, Batches>();
  private facts: Record<string, Arr> | null = null;

  constructor(
    private readonly seed: bigint,
    private readonly data: FittedData,
    private readonly hyper: Record<string, number>,
    private readonly draws: Draws,
    private readonly features: Features | null,
    /** The lengths that there are graphs for beside the whole one, ascending. */
    private readonly edges: readonly number[],
  ) {}

  /** What any function may read: scalars of the task, facts about the data, and noise of its own (draw `number`). */
  given(graph: Graph, number: number): Arrays {
    const feeds: Arrays = {};
    for (const port of inputsOf(graph, "data")) feeds[port.name] = this.fact(graph, port);
    for (const port of inputsOf(graph, "hyper")) {
      const value = this.hyper[labelOf(port)];
      if (value === undefined) {
        throw new BundleError(`the round sets no value for '${port.name}'; the server must announce it`);
      }
      feeds[port.name] = filled(port, value);
    }
    inputsOf(graph, "noise").forEach((port, place) => {
      const drawn = noise(this.seed, number, place, sizeOf(port.shape));
      const array = zeros(port.dtype as Dtype, port.shape);
      (array.data as Float32Array).set(drawn);
      feeds[port.name] = array;
    });
    return feeds;
  }

  /** Batches of a step; without the padding that `shorter`, which takes the place of `graph` in it, does not read. */
  async batches(graph: Graph, step: number, shorter: Graph): Promise<Arrays> {
    const feeds: Arrays = {};
    for (const port of inputsOf(graph, "batch")) {
      const [stream, part] = parted(port);
      if (part === "mask") continue;
      const whole = await this.part(port, this.rows(stream, rowsOfPort(port), step));
      const short = shorter === graph ? undefined : shorter.inputs.find((each) => each.name === port.name);
      feeds[port.name] = short ? cut(whole, short) : whole;
    }
    return feeds;
  }

  /** Tokens of the longest sample in the batches that `graph` reads in a step. */
  longest(graph: Graph, step: number): number {
    let most = 1;
    for (const port of inputsOf(graph, "batch")) {
      for (const row of this.rows(parted(port)[0], rowsOfPort(port), step)) most = Math.max(most, this.data.lengths[row]!);
    }
    return most;
  }

  /** The batch of step `step` of a pass over the data, with its mask. */
  async passed(graph: Graph, step: number): Promise<Arrays> {
    const feeds: Arrays = {};
    for (const port of inputsOf(graph, "batch")) {
      const [, part] = parted(port);
      const batch = rowsOfPort(port);
      feeds[port.name] = part === "mask"
        ? checkPort(port, { dtype: "float32", shape: [batch], data: passMask(this.data.count, batch, step) })
        : await this.part(port, passed(this.data.count, batch, step));
    }
    return feeds;
  }

  private rows(stream: number, batch: number, step: number): Rows {
    let batches = this.drawn.get(batch);
    if (batches === undefined) {
      batches = new Batches(this.seed, this.data.count, batch, this.draws, this.buckets());
      this.drawn.set(batch, batches);
    }
    return batches.indices(stream, step);
  }

  private buckets(): Int32Array | null {
    if (!this.edges.length) return null;
    return this.data.lengths.map((length) => this.edges.filter((edge) => edge < length).length);
  }

  private async part(port: Port, rows: Rows): Promise<Arr> {
    const [, part] = parted(port);
    if (part === "y") return checkPort(port, this.data.labels(rows));
    if (part === "x") return checkPort(port, this.features ? await this.features(rows) : await this.data.rows(rows));
    return checkPort(port, await otherRows(this.data, port, rows));
  }

  private fact(graph: Graph, port: Port): Arr {
    this.facts ??= this.data.facts();
    const found = this.facts[labelOf(port)];
    if (found === undefined) {
      const known = Object.keys(this.facts).join(", ") || "none, as its labels are no class numbers";
      throw new BundleError(
        `graph '${graph.name}' asks for '${port.name}' of the local data, this device can tell: ${known}; export the bundle ` +
          "for data like these, or install a newer edgefl",
      );
    }
    return checkPort(port, found);
  }
}

/** Rows of an input beside x, or of the samples themselves; BundleError if the manifest does not describe it. */
export async function otherRows(data: FittedData, port: Port, rows: Rows): Promise<Arr> {
  const [, name] = parted(port);
  if (Object.hasOwn(data.others, name)) return data.other(name, rows);
  if (name === "sample") return data.rows(rows);
  throw new BundleError(
    `a graph reads '${port.name}', and the manifest describes no input '${name}' of the local data; export the bundle again`,
  );
}

/** `feeds`, if every input of the graph is there; its state is looked for in `state`. */
export function complete(graph: Graph, feeds: Arrays, state: ReadonlyMap<string, unknown>): Arrays {
  const hungry = graph.inputs.filter((port) => (port.role === "state" ? !state.has(port.name) : !(port.name in feeds)));
  if (!hungry.length) return feeds;
  throw new BundleError(
    `graph '${graph.name}' reads ${hungry.map((port) => port.name).join(", ")}, which nobody feeds there (see the roles in ` +
      "docs/protocol.md); export the bundle again",
  );
}

function parted(port: Port): [stream: number, part: string] {
  const label = labelOf(port);
  const dot = label.indexOf(".");
  return [Number(label.slice(0, dot)), label.slice(dot + 1)];
}

/** Rows of a batch port; one for a scalar, which no batch fits. */
const rowsOfPort = (port: Port): number => port.shape[0] ?? 1;

function filled(port: Port, value: number): Arr {
  const array = zeros(port.dtype as Dtype, port.shape);
  if (array.data instanceof BigInt64Array || array.data instanceof BigUint64Array) array.data.fill(BigInt(Math.trunc(value)));
  else array.data.fill(value);
  return array;
}

/** The beginning of each row, as long as the port is. */
function cut(array: Arr, port: Port): Arr {
  if (port.shape.length < 2) return checkPort(port, array);
  const [rows, whole] = [array.shape[0]!, sizeOf(array.shape.slice(2)) * array.shape[1]!];
  const kept = sizeOf(port.shape.slice(2)) * port.shape[1]!;
  const made = zeros(array.dtype, [rows, port.shape[1]!, ...array.shape.slice(2)]);
  const [to, from] = [made.data as Uint8Array, array.data as Uint8Array];
  for (let row = 0; row < rows; row++) to.set(from.subarray(row * whole, row * whole + kept), row * kept);
  return checkPort(port, made);
}
