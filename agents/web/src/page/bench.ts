/** One training step after the other in the agent's engine, for `python -m benchmarks web`, which drives this page. */
import { OnnxEngine } from "../engine/onnx";
import type { LoadedGraph, State } from "../engine/base";
import { Graph, inputsOf, outputsOf, type Port } from "../wire/bundle/graphs";
import { decode } from "../wire/msgpack";
import { load, type Arrays } from "../wire/tensors";

const BATCHES = 2;

class Bench {
  private readonly engine = new OnnxEngine({
    assets: new URL("ort/", document.baseURI).href,
    threads: Number(new URLSearchParams(location.search).get("threads") ?? 1),
  });
  private graph: Graph | null = null;
  private loaded: LoadedGraph | null = null;
  private state: State = new Map();
  private batches: Arrays[] = [];
  private done = 0;

  /** The engine open, and nothing loaded: what a page takes that waits for a round. */
  async open(): Promise<void> {
    await this.engine.write({ dtype: "float32", shape: [1], data: new Float32Array(1) });
  }

  /** Milliseconds until the graph below `folder` can be run. */
  async load(folder: string): Promise<number> {
    const [graph, artifact, state, ...batches] = await Promise.all(
      ["graph.msgpack", "graph.bin", "state.safetensors", "batch0.safetensors", "batch1.safetensors"].map((name) => bytes(folder + name)),
    );
    this.graph = Graph.read(decode(graph!), "$");
    this.batches = batches.slice(0, BATCHES).map((each) => load(each));
    const start = performance.now();
    this.loaded = await this.engine.load(this.graph, artifact!);
    const took = performance.now() - start;
    for (const [name, array] of Object.entries(load(state!))) this.state.set(name, await this.engine.write(array));
    return took;
  }

  /** Milliseconds of each of `count` steps; state stays in the engine. */
  async steps(count: number): Promise<number[]> {
    const times: number[] = [];
    for (let step = 0; step < count; step++) {
      const feeds = { ...this.batches[this.done++ % this.batches.length]!, ...this.noise() };
      const start = performance.now();
      const { state } = await this.loaded!.run(feeds, this.state);
      times.push(performance.now() - start);
      for (const [name, held] of state) this.state.set(name, held);
    }
    return times;
  }

  /** Metrics of one more step, to see that it trains. */
  async metrics(): Promise<Record<string, number>> {
    const { arrays, state } = await this.loaded!.run({ ...this.batches[0]!, ...this.noise() }, this.state);
    for (const [name, held] of state) this.state.set(name, held);
    return Object.fromEntries(outputsOf(this.graph!, "metric").map(({ name }) => [name, Number(arrays[name]!.data[0])]));
  }

  /** Bytes of WebAssembly's memory. */
  bytes(): number {
    return this.engine.bytes();
  }

  private noise(): Arrays {
    const drawn = (port: Port) => Float32Array.from({ length: port.shape.reduce((all, each) => all * each, 1) }, Math.random);
    const ports = inputsOf(this.graph!, "noise");
    return Object.fromEntries(ports.map((port) => [port.name, { dtype: "float32" as const, shape: port.shape, data: drawn(port) }]));
  }
}

async function bytes(url: string): Promise<Uint8Array> {
  const answer = await fetch(url);
  if (!answer.ok) throw new Error(`${url} is not there: ${answer.status}`);
  return new Uint8Array(await answer.arrayBuffer());
}

Object.assign(globalThis, { bench: new Bench() });
