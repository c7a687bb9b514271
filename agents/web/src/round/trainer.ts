/** One round on the device, for any manifest. The runner knows graphs, roles and ports, and no method by name. */
import type { FittedData } from "../data/samples";
import type { Engine, LoadedGraph, State } from "../engine/base";
import type { Job } from "../store/rows";
import type { Store } from "../store/store";
import { type Dtype, scalarOf, zeros } from "../wire/arrays";
import { type Graph, inputsOf, labelOf, outputsOf } from "../wire/bundle/graphs";
import { graphOf, type Manifest, type Phase, stepsWith } from "../wire/bundle/manifest";
import type { Arrays } from "../wire/tensors";
import type { RoundProfiler } from "./profiler";
import { complete, RoundInputs } from "./inputs";
import { MultiStepForward } from "./forward";
import { type Blobs, checkPort, GraphLoader, labelled } from "./graph_loader";
import type { TrainerSettings } from "./control";

/** What is sent, what is kept until the next round, and what is told. */
export interface RoundResult {
  update: Arrays;
  /** Those of the update that are packed bits, with their number of entries. */
  masks: Record<string, number>;
  carry: Arrays;
  metrics: Record<string, number>;
  samples: number;
}

interface Current {
  job: Job;
  feeds: RoundInputs;
  steps: number[];
  total: number;
  basis: string;
}

type Sums = Record<string, number>;

export class LocalTrainer {
  private readonly graphs: GraphLoader;

  constructor(
    private readonly engine: Engine,
    private readonly manifest: Manifest,
    blobs: Blobs,
    private readonly store: Store,
    private readonly costs: RoundProfiler,
    private readonly settings: TrainerSettings,
  ) {
    this.graphs = new GraphLoader(engine, manifest, blobs, costs);
  }

  /** The whole round. `origin` names the carry: a checkpoint that began with another one is not gone on from. */
  async run(job: Job, all: FittedData, carry: Arrays, origin: string): Promise<RoundResult> {
    const data = all.first(job.samples);
    const forward = new MultiStepForward(this.graphs, this.manifest, this.store, this.costs, this.settings);
    const record = this.manifest.prefix.length ? await forward.record(job, data) : null;
    const steps = stepsWith(this.manifest, data.count);
    const edges = this.manifest.phases.flatMap((phase) => phase.shorter.map((bucket) => bucket.length));
    const lengths = [...new Set(edges)].sort((one, other) => one - other);
    const hyper = { ...this.manifest.hyper, ...job.hyper };
    const features = record && ((rows: Int32Array) => record.rows(rows));
    const feeds = new RoundInputs(job.seed, data, hyper, this.manifest.draws, features, lengths);
    const total = steps.reduce((sum, each) => sum + each, 0);
    const current = { job, feeds, steps, total, basis: `${data.count} rows, carry ${origin}` };
    const [state, sums] = await this.train(current, carry);
    const finish = graphOf(this.manifest, this.manifest.finish);
    const given = { ...(await this.kept(current, finish, carry)), ...feeds.given(finish, total + 1) };
    const outputs = await this.once(finish, complete(finish, given, state), state);
    this.engine.drop(state);
    await record?.delete();
    const metrics = Object.entries(labelled(outputs.arrays, "metric")).map(([name, value]) => [name, scalarOf(value)] as const);
    return {
      update: labelled(outputs.arrays, "update"),
      masks: Object.fromEntries(outputsOf(finish, "update").filter((port) => port.mask).map((port) => [labelOf(port), port.mask])),
      carry: labelled(outputs.arrays, "carry"),
      metrics: { ...this.means(sums, steps), ...Object.fromEntries(metrics) },
      samples: data.count,
    };
  }

  private async train(current: Current, carry: Arrays): Promise<[State, Sums]> {
    const saved = await this.store.checkpoint(current.job.nonce);
    const resumed = saved?.basis === current.basis ? saved : null;
    let state: State = new Map();
    const sums: Sums = { ...resumed?.sums };
    const done = resumed?.step ?? 0;
    if (resumed) for (const [name, array] of resumed.tensors) state.set(name, await this.engine.write(array));
    else state = await this.start(current, carry);
    let position = 0;
    for (const [place, phase] of this.manifest.phases.entries()) {
      const end = position + current.steps[place]!;
      const loaded = new Map<string, LoadedGraph>();
      try {
        for (let step = Math.max(position, done); step < end; step++) {
          await this.settings.between();
          state = await this.step(current, phase, loaded, state, position, step, sums);
          await this.keep(current, state, step + 1, sums);
        }
      } finally {
        for (const graph of loaded.values()) graph.release();
      }
      position = end;
    }
    return [state, sums];
  }

  private async start(current: Current, carry: Arrays): Promise<State> {
    const spec = graphOf(this.manifest, this.manifest.start);
    const feeds = { ...(await this.kept(current, spec, carry)), ...current.feeds.given(spec, current.total) };
    return (await this.once(spec, complete(spec, feeds, new Map()), new Map())).state;
  }

  private async once(spec: Graph, feeds: Arrays, state: State) {
    const graph = await this.graphs.load(spec.name);
    try {
      return await graph.run(feeds, state);
    } finally {
      graph.release();
    }
  }

  /** What a graph reads of the round's weights, and of what the previous round left (zeros if nothing did). */
  private async kept(current: Current, spec: Graph, carry: Arrays): Promise<Arrays> {
    const weights = inputsOf(spec, "weights").length ? await this.graphs.fetch(current.job, this.manifest.suffix) : {};
    const feeds = this.graphs.weightFeeds(spec, weights);
    for (const port of inputsOf(spec, "carry")) {
      feeds[port.name] = checkPort(port, carry[labelOf(port)] ?? zeros(port.dtype as Dtype, port.shape));
    }
    return feeds;
  }

  /** One step; `first` is the phase's first, both counted over all phases. */
  private async step(
    current: Current, phase: Phase, loaded: Map<string, LoadedGraph>, state: State, first: number, step: number, sums: Sums,
  ): Promise<State> {
    const whole = graphOf(this.manifest, phase.graph);
    const feeds = current.feeds;
    let spec = whole;
    if (phase.shorter.length) {
      const longest = feeds.longest(whole, step);
      const bucket = phase.shorter.find((each) => each.length >= longest);
      if (bucket) spec = graphOf(this.manifest, bucket.graph);
    }
    const batch = phase.over_data ? await feeds.passed(spec, step - first) : await feeds.batches(whole, step, spec);
    const fed = complete(spec, { ...feeds.given(spec, step), ...batch }, state);
    let graph = loaded.get(spec.name);
    if (graph === undefined) loaded.set(spec.name, (graph = await this.graphs.load(spec.name)));
    const outputs = await this.costs.timed("step", () => graph.run(fed, state));
    this.settings.worked(this.costs.last("step"));
    for (const [metric, value] of Object.entries(labelled(outputs.arrays, "metric"))) {
      sums[metric] = (sums[metric] ?? 0) + scalarOf(value);
    }
    const loss = this.means(sums, madeOf(current.steps, step + 1))["loss"] ?? NaN;
    this.settings.watch({ stage: "train", step: step + 1, steps: current.total, loss, stepMs: this.costs.last("step") });
    return new Map([...state, ...outputs.state]);
  }

  private async keep(current: Current, state: State, step: number, sums: Sums): Promise<void> {
    if (step % this.settings.checkpointSteps !== 0 && step !== current.total) return;
    const tensors: [string, Awaited<ReturnType<Engine["read"]>>][] = [];
    for (const [name, held] of state) tensors.push([name, await this.engine.read(held)]);
    await this.store.saveCheckpoint({ nonce: current.job.nonce, step, sums: { ...sums }, basis: current.basis, tensors });
  }

  /** Of each metric, the mean over the steps that report it, where `steps` of each phase were made. */
  private means(sums: Sums, steps: readonly number[]): Record<string, number> {
    const graphs = this.manifest.phases.map((phase) => graphOf(this.manifest, phase.graph));
    const reporting = (name: string) =>
      graphs.reduce((sum, graph, place) =>
        sum + (outputsOf(graph, "metric").some((port) => labelOf(port) === name) ? steps[place]! : 0), 0);
    return Object.fromEntries(Object.entries(sums).map(([name, total]) => [name, total / Math.max(1, reporting(name))]));
  }
}

/** The steps made in each phase when `done` are, counted over all phases. */
function madeOf(steps: readonly number[], done: number): number[] {
  let left = done;
  return steps.map((count) => {
    const made = Math.min(count, left);
    left -= made;
    return made;
  });
}
