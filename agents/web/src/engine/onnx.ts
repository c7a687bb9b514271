/** ONNX graphs in WebAssembly (SIMD). Inputs and outputs have memory that stays; state is written beside the old one. */
import type { Arr } from "../wire/arrays";
import { BundleError, EdgeflError, said } from "../wire/errors";
import { artifactsOf, type Graph, outputsOf, segmentOf } from "../wire/bundle/graphs";
import type { Arrays } from "../wire/tensors";
import { faster } from "./forms";
import type { Engine, Held, LoadedGraph, Outputs, State } from "./base";
import { allocate, check, instantiate, lastError, type ModuleSettings, type OrtModule, textIn } from "./module";
import { SegmentedGraph } from "./segments";
import { Session } from "./session";
import { freeAll, HeldTensor } from "./tensor";

/** Pinned in package.json: the module's functions are those of one release. */
export const ORT_VERSION = "1.30.0";
const FATAL = 4;
/** How sessions are made: all optimizations, an arena, and no memory patterns. */
const [ALL, ARENA, PATTERN] = [99, true, false] as const;


export class OnnxEngine implements Engine {
  readonly name = "onnxruntime-web";
  readonly version = ORT_VERSION;
  readonly format = "onnx" as const;
  private module: Promise<OrtModule> | null = null;
  private started: OrtModule | null = null;

  constructor(private readonly settings: ModuleSettings) {}

  async load(graph: Graph, artifact: Uint8Array): Promise<LoadedGraph> {
    if (!graph.segments.length) return this.loaded(graph, artifact);
    const artifacts = artifactsOf(graph, artifact);
    const parts: OnnxGraph[] = [];
    for (const [place, each] of artifacts.entries()) parts.push(await this.loaded(segmentOf(graph, place), each));
    return new SegmentedGraph(parts);
  }

  private async loaded(graph: Graph, artifact: Uint8Array): Promise<OnnxGraph> {
    const module = await this.running();
    try {
      return new OnnxGraph(graph, module, new Session(module, graph, await fastest(module, artifact)));
    } catch (error) {
      if (error instanceof EdgeflError && error.message.includes(graph.name)) throw error;
      throw new BundleError(
        `onnxruntime-web ${this.version} cannot load graph '${graph.name}': ${said(error)}; export the bundle for this version`,
      );
    }
  }

  read(held: Held): Promise<Arr> {
    return Promise.resolve((held as HeldTensor).get());
  }

  async write(array: Arr): Promise<Held> {
    const tensor = new HeldTensor(await this.running(), array);
    tensor.set(array);
    return tensor;
  }

  drop(state: State): void {
    for (const held of state.values()) (held as HeldTensor).free();
    state.clear();
  }

  bytes(): number {
    return this.started?.HEAPU8.byteLength ?? 0;
  }

  /** WebAssembly's memory never shrinks: it goes with the instance, but threads would stay behind one. */
  rest(): void {
    if (this.settings.threads === 1) this.module = this.started = null;
    else if (this.started) freeAll(this.started);
  }

  private running(): Promise<OrtModule> {
    this.module ??= instantiate(this.settings).then(
      (module) => (this.started = module),
      (error: unknown) => {
        this.module = null; // the next attempt may have more memory, or a network
        throw error;
      },
    );
    return this.module;
  }
}

/** A session of the form that is fastest here; of the graph's own where that is refused, as for other numbers than float32. */
async function fastest(module: OrtModule, artifact: Uint8Array): Promise<number> {
  const form = faster(artifact);
  if (form === null) return createSession(module, artifact);
  return createSession(module, form).catch(() => createSession(module, artifact));
}

/** A session of the ONNX model as it is, to be released; BundleError with what onnxruntime says. */
export async function createSession(module: OrtModule, model: Uint8Array): Promise<number> {
  const options = module._OrtCreateSessionOptions(ALL, ARENA, PATTERN, 0, false, 0, 0, FATAL, 0, 0);
  if (!options) throw new BundleError(lastError(module));
  // By their first bytes, graphs would be read in a format of onnxruntime's own, too.
  const texts = ["session.load_model_format", "ONNX"].map((text) => textIn(module, text));
  const data = allocate(module, model.length);
  try {
    check(module, module._OrtAddSessionConfigEntry(options, texts[0]!, texts[1]!), "its options are refused");
    module.HEAPU8.set(model, data);
    const session = await module._OrtCreateSession(data, model.length, options);
    if (!session) throw new BundleError(lastError(module));
    return session;
  } finally {
    module._free(data);
    texts.forEach((text) => module._free(text));
    module._OrtReleaseSessionOptions(options);
  }
}

/** A session and the memory of its ports. */
export class OnnxGraph implements LoadedGraph {
  private readonly inputs = new Map<string, HeldTensor>();
  private readonly outputs = new Map<string, HeldTensor>();
  /** State that was read and rewritten: the next run writes there. */
  private readonly spare: State = new Map();

  constructor(readonly graph: Graph, private readonly module: OrtModule, private readonly session: Session) {
    for (const port of graph.inputs) if (port.role !== "state") this.inputs.set(port.name, new HeldTensor(module, port));
    for (const port of graph.outputs) if (port.role !== "state") this.outputs.set(port.name, new HeldTensor(module, port));
  }

  async run(feeds: Arrays, state: State): Promise<Outputs> {
    for (const [name, tensor] of this.inputs) tensor.set(feeds[name]!);
    const later = this.later(state);
    const read = this.graph.inputs.map((port) => (this.inputs.get(port.name) ?? state.get(port.name)) as HeldTensor);
    const written = this.graph.outputs.map((port) => (this.outputs.get(port.name) ?? later.get(port.name)) as HeldTensor);
    await this.session.run(read, written);
    for (const [name, held] of later) {
      const before = state.get(name);
      if (before !== undefined && before !== held) this.spare.set(name, before);
    }
    const arrays = Object.fromEntries([...this.outputs].map(([name, tensor]) => [name, tensor.get()]));
    return { state: later, arrays };
  }

  private later(state: State): State {
    const later: State = new Map();
    for (const port of outputsOf(this.graph, "state")) {
      const place = this.graph.in_place.includes(port.name) ? state.get(port.name) : this.spare.get(port.name);
      this.spare.delete(port.name);
      later.set(port.name, place ?? new HeldTensor(this.module, port));
    }
    return later;
  }

  release(): void {
    for (const tensor of [...this.inputs.values(), ...this.outputs.values()]) tensor.free();
    for (const held of this.spare.values()) (held as HeldTensor).free();
    this.inputs.clear();
    this.outputs.clear();
    this.spare.clear();
    this.session.release();
  }
}
