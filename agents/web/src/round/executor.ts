/** The work on one round: fetch its bundle, train, and put the update into the outbox. */
import type { LocalSamples } from "../data/samples";
import { fitRows } from "../data/split";
import type { Engine } from "../engine/base";
import type { Fetcher } from "../link/fetch";
import type { ServerTrust } from "../link/identity";
import type { BlobStore } from "../store/blobs";
import type { Job } from "../store/rows";
import type { Store } from "../store/store";
import { ProtocolError, RoundDeclined, StoreError } from "../wire/errors";
import type { Limits } from "../wire/limits";
import { decodeManifest, type Manifest, stepsWith } from "../wire/bundle/manifest";
import { Update, written } from "../wire/messages";
import { dump } from "../wire/tensors";
import { checkManifestRef, checkMemory, checkRuntime, checkWeights, checkWork } from "./bounds";
import { RoundProfiler } from "./profiler";
import { carryName, takeUp, type Tell } from "./resume";
import { type RoundResult, LocalTrainer } from "./trainer";
import { RoundControl, type TrainerSettings, type Step } from "./control";

/** What a device works with. */
export interface ExecutorParts {
  device: string;
  limits: Limits;
  memoryBytes: number;
  engine: Engine;
  data: LocalSamples;
  fetcher: Fetcher;
  store: Store;
  blobs: BlobStore;
  trust: ServerTrust;
  /** Waits while the device is paused. */
  open: () => Promise<void>;
  aborted: () => boolean;
  begins: (job: Job, rows: number, steps: number) => void;
  watch: (job: Job, step: Step) => void;
  dropped: Tell;
}

/**
 * One round, from the first blob to the outbox. RoundAborted when the round is over, RoundDeclined if this device cannot
 * take part in it, DataError if the local data do not fit, and other errors after which it may be tried again.
 */
export async function work(bench: ExecutorParts, job: Job): Promise<void> {
  const { engine, limits, fetcher, store } = bench;
  const guard = new RoundControl(limits, bench.aborted, bench.open);
  await guard.between();
  checkTries(job, limits);
  checkOffered(job, engine);
  checkManifestRef(job.bundle, limits);
  bench.trust.checkBundle(job.bundle.sha256, job.signature);
  const manifest = decodeManifest(await fetcher.get(job.bundle));
  const wrong = manifest.graphs.find((graph) => graph.format !== engine.format);
  if (wrong) throw new ProtocolError(`the bundle holds ${wrong.format} graphs, this device runs ${engine.format}`);
  checkRuntime(manifest, engine);
  checkMemory(manifest, bench.memoryBytes);
  checkWeights(job, manifest);
  const costs = new RoundProfiler(() => engine.bytes());
  const data = await fitRows(bench.data, manifest);
  const start = await takeUp(store, job, manifest, bench.dropped);
  const rows = data.first(job.samples).count;
  checkWork(manifest, rows, limits);
  bench.begins(job, rows, stepsWith(manifest, rows).reduce((sum, each) => sum + each, 0));
  const runner = new LocalTrainer(engine, manifest, fetcher, store, costs, settingsOf(bench, job, guard));
  const result = await runner.run(job, data, start.arrays, start.origin);
  await handOver(bench, job, manifest, result, costs);
}

function settingsOf(bench: ExecutorParts, job: Job, guard: RoundControl): TrainerSettings {
  return {
    checkpointSteps: bench.limits.checkpoint_steps,
    watch: (step) => bench.watch(job, step),
    between: () => guard.between(),
    worked: (ms) => guard.worked(ms),
    async room(bytes) {
      if (bytes > bench.limits.store_bytes) {
        throw new RoundDeclined(
          "too-much-work",
          `this round keeps ${bytes} bytes in the store, which may hold ${bench.limits.store_bytes}: raise ` +
            "limits.store_bytes or ask for a smaller tier",
        );
      }
      await bench.blobs.dropOldest(bytes);
    },
  };
}

function checkTries(job: Job, limits: Limits): void {
  if (job.tries <= limits.attempts) return;
  throw new RoundDeclined(
    "crashed",
    `the work on round ${job.round} was begun ${limits.attempts} times (limits.attempts), and each time its process ended: ` +
      "this device leaves it",
  );
}

function checkOffered(job: Job, engine: Engine): void {
  if (job.format === engine.format) return;
  throw new RoundDeclined(
    "no-format",
    `tier '${job.tier}' is offered in format ${job.format}, and this device's engine runs ${engine.format}: have the server ` +
      `export that too (formats = ["${job.format}", "${engine.format}"] in [export])`,
  );
}

async function handOver(bench: ExecutorParts, job: Job, manifest: Manifest, result: RoundResult, costs: RoundProfiler): Promise<void> {
  const received = bench.fetcher.takeReceived();
  const update = written(Update, {
    v: 1,
    run: job.run,
    round: job.round,
    device: bench.device,
    nonce: job.nonce,
    tier: job.tier,
    model_version: job.model_version,
    samples: result.samples,
    metrics: result.metrics,
    profile: {
      step_ms: costs.median("step"),
      forward_ms: costs.total("forward"),
      load_ms: costs.total("load"),
      idle_bytes: costs.idleBytes,
      peak_bytes: costs.peakBytes,
      down_bytes: received.payload,
      down_wire_bytes: received.wire,
      variants: {},
      dropped: {},
      mirror_bytes: bench.fetcher.mirrors.takeReceived(),
    },
    codec: manifest.codec,
    codec_version: manifest.codec_version,
    tensors: dump(result.update, result.masks),
  });
  const carry = Object.keys(result.carry).length ? dump(result.carry) : null;
  const outgoing = { run: job.run, round: job.round, nonce: job.nonce, data: update, ask: job.ask, shard: job.shard };
  try {
    await bench.store.finishJob(outgoing, carry, carryName(job, manifest));
  } catch (error) {
    if (!(error instanceof StoreError)) throw error;
    await bench.blobs.dropOldest(bench.limits.store_bytes); // an update is worth more than all blobs
    await bench.store.finishJob(outgoing, carry, carryName(job, manifest));
  }
}

