/** Multi-step forward pass: the frozen prefix, chunk by chunk, into a record in the store. */
import type { FittedData, Rows } from "../data/samples";
import { Record } from "../store/records";
import type { Job } from "../store/rows";
import type { Store } from "../store/store";
import { type Arr, bytesOf, type Dtype, rowsOf } from "../wire/arrays";
import { BundleError } from "../wire/errors";
import { type Graph, inputsOf, labelOf, outputsOf, type Port } from "../wire/bundle/graphs";
import { graphOf, type Manifest } from "../wire/bundle/manifest";
import type { RoundProfiler } from "./profiler";
import { otherRows } from "./inputs";
import { checkPort, type GraphLoader } from "./graph_loader";
import { weightsOf } from "./job";
import type { TrainerSettings } from "./control";

/** Rows of a record that stay in memory: training draws them in random order. */
const CACHE_BYTES = 32 << 20;

/** What a record belongs to: the run, the model as it was put together, the bundle (which cuts it) and the rows. */
export function recordTag(job: Job): string {
  const model = `model ${job.model_version} as ${weightsOf(job)}`;
  return `run ${job.run}, ${model}, bundle ${job.bundle.sha256}, samples ${job.samples}`;
}

export class MultiStepForward {
  constructor(
    private readonly graphs: GraphLoader,
    private readonly manifest: Manifest,
    private readonly store: Store,
    private readonly costs: RoundProfiler,
    private readonly settings: TrainerSettings,
  ) {}

  /** The boundary activations, one row per sample. Chunks whose record is sealed already are not run again. */
  async record(job: Job, data: FittedData): Promise<Record> {
    let [first, source] = await this.sealed(job, data);
    for (let index = first; index < this.manifest.prefix.length; index++) {
      const following = await this.chunk(index, job, source, data);
      await source?.delete();
      source = following;
    }
    return source!;
  }

  private async sealed(job: Job, data: FittedData): Promise<[number, Record | null]> {
    for (let index = this.manifest.prefix.length - 1; index >= 0; index--) {
      const group = flowing(graphOf(this.manifest, this.manifest.prefix[index]!.graph)).shape[0]!;
      const record = await Record.reopen(this.store, index, recordTag(job), group, CACHE_BYTES);
      if (record?.count === data.count) return [index + 1, record];
    }
    return [0, null];
  }

  /** Fetch one chunk's units, run them over all rows in fixed groups, drop them. The last group is filled by wrap-around. */
  private async chunk(index: number, job: Job, source: Record | null, data: FittedData): Promise<Record> {
    const { units, graph: name } = this.manifest.prefix[index]!;
    const spec = graphOf(this.manifest, name);
    const [out, port] = [only(outputsOf(spec, "record"), name), flowing(spec)];
    const others = inputsOf(spec, "batch").filter((each) => each !== port);
    const shape = [data.count, ...out.shape.slice(1)];
    await this.settings.room(bytesOf({ dtype: out.dtype, shape }));
    const weights = this.graphs.weightFeeds(spec, await this.graphs.fetch(job, units));
    const graph = await this.graphs.load(name);
    try {
      const group = port.shape[0]!;
      const record = await Record.create(this.store, index, shape, out.dtype as Dtype, group, CACHE_BYTES);
      for (let start = 0; start < data.count; start += group) {
        await this.settings.between();
        const rows: Rows = Int32Array.from({ length: group }, (_, at) => (start + at) % data.count);
        const count = Math.min(group, data.count - start);
        const result = await this.costs.timed("forward", async () => {
          const batch: { [name: string]: Arr } = { [port.name]: checkPort(port, source ? await source.rows(rows) : await data.rows(rows)) };
          for (const each of others) batch[each.name] = checkPort(each, await otherRows(data, each, rows));
          return (await graph.run({ ...weights, ...batch }, new Map())).arrays[out.name]!;
        });
        this.settings.worked(this.costs.last("forward"));
        await record.write(start, rowsOf(result, Int32Array.from({ length: count }, (_, at) => at)));
        this.settings.watch({ stage: `forward ${index + 1}`, step: start + count, steps: data.count, loss: NaN, stepMs: 0 });
      }
      await record.seal(recordTag(job));
      return record;
    } finally {
      graph.release();
    }
  }
}

/** What a chunk reads of a row that flows through all of them. */
function flowing(graph: Graph): Port {
  return only(inputsOf(graph, "batch").filter((port) => labelOf(port) === "0.x"), graph.name);
}

function only(ports: readonly Port[], graph: string): Port {
  if (ports.length === 1) return ports[0]!;
  throw new BundleError(`graph '${graph}' should have one tensor in and one out, found ${ports.length}; export it again`);
}
