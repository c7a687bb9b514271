/**
 * ONNX graphs on the graphics card, by onnxruntime-web's own API: state stays in buffers of the card between steps. Which
 * ops ran there is looked up in a profile of each graph's first run, and told: what the card has no kernel for runs in
 * WebAssembly, with copies each way.
 */
import type { InferenceSession, Tensor } from "onnxruntime-web/webgpu";
import type { Arr, Dtype } from "../wire/arrays";
import { BundleError, said } from "../wire/errors";
import { artifactsOf, type Graph, segmentOf } from "../wire/bundle/graphs";
import type { Arrays } from "../wire/tensors";
import type { Engine, Held, LoadedGraph, Outputs, State } from "./base";
import { ORT_VERSION } from "./onnx";
import { placementIn, placementText } from "./placement";
import { SegmentedGraph } from "./segments";

type Ort = typeof import("onnxruntime-web/webgpu");

export class WebGpuEngine implements Engine {
  readonly name = "onnxruntime-web-webgpu";
  readonly version = ORT_VERSION;
  readonly format = "onnx" as const;
  private ort: Promise<Ort> | null = null;
  private readonly sessions: InferenceSession[] = [];

  /** `assets`: URL of the folder with onnxruntime's files; `tell`: people, of where the ops of a graph run. */
  constructor(private readonly assets: string, private readonly tell: (text: string) => void) {}

  async load(graph: Graph, artifact: Uint8Array): Promise<LoadedGraph> {
    if (!graph.segments.length) return this.loaded(graph, artifact);
    const parts = [];
    for (const [place, each] of artifactsOf(graph, artifact).entries()) parts.push(await this.loaded(segmentOf(graph, place), each));
    return new SegmentedGraph(parts);
  }

  private async loaded(graph: Graph, artifact: Uint8Array): Promise<CardGraph> {
    const ort = await this.running();
    try {
      return new CardGraph(ort, graph, (profiled) => this.session(ort, graph, artifact, profiled), this.tell);
    } catch (error) {
      throw new BundleError(`onnxruntime-web ${this.version} cannot load graph '${graph.name}' on the card: ${said(error)}`);
    }
  }

  private async session(ort: Ort, graph: Graph, artifact: Uint8Array, profiled: boolean): Promise<InferenceSession> {
    // What `start` leaves is read by another session, and so comes by way of the processor.
    const stays = graph.inputs.some((port) => port.role === "state");
    const names = await outputNames(ort, artifact);
    const place = (index: number) => (stays && graph.outputs[index]?.role === "state" ? "gpu-buffer" : "cpu");
    const session = await ort.InferenceSession.create(artifact, {
      executionProviders: ["webgpu"], logSeverityLevel: 4, enableProfiling: profiled,
      preferredOutputLocation: Object.fromEntries(names.map((name, index) => [name, place(index)])),
    });
    this.sessions.push(session);
    return session;
  }

  async read(held: Held): Promise<Arr> {
    const tensor = held as Tensor;
    const data = await tensor.getData();
    return { dtype: tensor.type as Dtype, shape: [...tensor.dims], data: (data as Float32Array).slice() };
  }

  async write(array: Arr): Promise<Held> {
    return tensorOf(await this.running(), array);
  }

  drop(state: State): void {
    for (const held of state.values()) (held as Tensor).dispose();
    state.clear();
  }

  bytes(): number {
    return 0; // no page is told what a card holds
  }

  /** Buffers belong to the sessions that made them, so these end together. */
  rest(): void {
    for (const session of this.sessions.splice(0)) void session.release();
  }

  private running(): Promise<Ort> {
    this.ort ??= import("onnxruntime-web/webgpu").then(async (ort) => {
      listen();
      if (!(await (globalThis.navigator as { gpu?: { requestAdapter(): Promise<unknown> } }).gpu?.requestAdapter())) {
        throw new BundleError("this browser offers no WebGPU here: use the engine wasm, or another browser");
      }
      ort.env.wasm.wasmPaths = this.assets;
      ort.env.wasm.numThreads = 1;
      return ort;
    });
    return this.ort;
  }
}

/** The names of a graph's outputs, which a session is told before it is made: read by one that runs nothing. */
async function outputNames(ort: Ort, artifact: Uint8Array): Promise<readonly string[]> {
  const session = await ort.InferenceSession.create(artifact, {
    executionProviders: ["wasm"], graphOptimizationLevel: "disabled", logSeverityLevel: 4,
  });
  const names = [...session.outputNames];
  await session.release();
  return names;
}

function tensorOf(ort: Ort, array: Arr): Tensor {
  return new ort.Tensor(array.dtype as "float32", array.data as Float32Array, array.shape);
}

/** A session of the card; its first run is profiled. */
class CardGraph implements LoadedGraph {
  private session: InferenceSession | null = null;

  constructor(
    private readonly ort: Ort,
    readonly graph: Graph,
    private readonly make: (profiled: boolean) => Promise<InferenceSession>,
    private readonly tell: (text: string) => void,
  ) {}

  async run(feeds: Arrays, state: State): Promise<Outputs> {
    const inputs = Object.fromEntries(this.graph.inputs.map((port) => [
      port.name, port.role === "state" ? (state.get(port.name) as Tensor) : tensorOf(this.ort, feeds[port.name]!),
    ]));
    const session = this.session ?? (await this.profiled(inputs));
    const results = await session.run(inputs);
    const later: State = new Map();
    const arrays: Arrays = {};
    for (const [place, port] of this.graph.outputs.entries()) {
      const found = results[session.outputNames[place]!]!;
      if (port.role === "state") later.set(port.name, found);
      else arrays[port.name] = { dtype: port.dtype as Dtype, shape: port.shape, data: (await found.getData()) as Float32Array };
    }
    for (const name of later.keys()) (state.get(name) as Tensor | undefined)?.dispose();
    return { state: later, arrays };
  }

  /** Runs once to see where each op runs; what that gave is thrown away, and state is read only. */
  private async profiled(inputs: Record<string, Tensor>): Promise<InferenceSession> {
    const session = await this.make(true);
    const lines = await printed(async () => {
      await session.run(inputs);
      session.endProfiling();
    });
    this.tell(placementText(this.graph.name, placementIn(lines)));
    return (this.session = await this.make(false));
  }

  release(): void {
    this.session = null; // see WebGpuEngine.rest
  }
}

/** Where what the module prints goes while somebody reads it: its profile. */
let read: string[] | null = null;

/** To be called before the module starts, as it keeps the function that it prints by. */
function listen(): void {
  const log = console.log.bind(console);
  console.log = (...words: unknown[]) => {
    if (read) read.push(words.join(" "));
    else log(...words);
  };
}

async function printed(work: () => Promise<void>): Promise<string[]> {
  const lines: string[] = (read = []);
  try {
    await work();
  } finally {
    read = null;
  }
  return lines;
}
