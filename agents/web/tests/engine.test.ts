/** onnxruntime's module as the engine calls it. */
import { copyFileSync, mkdtempSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { fileURLToPath, pathToFileURL } from "node:url";
import { setFlagsFromString } from "node:v8";
import { runInNewContext } from "node:vm";
import { describe, expect, it, vi } from "vitest";
import { faster } from "../src/engine/forms";
import { instantiate } from "../src/engine/module";
import { createSession, OnnxEngine, OnnxGraph } from "../src/engine/onnx";
import { Session } from "../src/engine/session";
import { HeldTensor } from "../src/engine/tensor";
import { type Arr, asBytes } from "../src/wire/arrays";
import { BundleError } from "../src/wire/errors";
import type { Graph } from "../src/wire/bundle/graphs";
import { dump } from "../src/wire/tensors";
import vectors from "./vectors.json";

const ASSETS = new URL("../node_modules/onnxruntime-web/dist/", import.meta.url).href;
const settings = { assets: ASSETS, threads: 1 };
setFlagsFromString("--expose-gc");
const collect = runInNewContext("gc") as () => void;

const rectifier = (dtype: "float32" | "float64" | "fused") => Uint8Array.from(Buffer.from(vectors.rectifiers[dtype], "base64"));
const portsOf = (dtype: "float32" | "float64") => {
  const port = (name: string, role: string, shape: number[]) => ({ name, role, dtype, shape, mask: 0, ignored: null });
  const inputs = [port("batch.0.x", "batch", [40]), port("hyper.scale", "hyper", [])];
  return { name: "rectifier", inputs, outputs: [port("update.y", "update", [40])], in_place: [], segments: [] } as unknown as Graph;
};
const array = (dtype: "float32" | "float64", shape: number[], values: number[]): Arr =>
  ({ dtype, shape, data: dtype === "float32" ? Float32Array.from(values) : Float64Array.from(values) });

describe("a graph with Relu", () => {
  const odd = [0, -0, NaN, -NaN, Infinity, -Infinity, 1e-45, -1e-45, 3, -3];
  const feeds = (dtype: "float32" | "float64") => ({
    "batch.0.x": array(dtype, [40], [...odd, ...odd, ...odd, ...odd]), "hyper.scale": array(dtype, [], [1]),
  });

  it("runs in a faster form with the same bits", async () => {
    const model = rectifier("float32");
    expect(String.fromCharCode(...faster(model)!)).toMatch(/^(?![^]*Relu)[^]*Max/);
    expect(faster(faster(model)!)).toBeNull();
    const module = await instantiate(settings);
    const own = new OnnxGraph(portsOf("float32"), module, new Session(module, portsOf("float32"), await createSession(module, model)));
    const expected = (await own.run(feeds("float32"), new Map())).arrays["update.y"]!;
    const quick = await new OnnxEngine(settings).load(portsOf("float32"), model);
    const found = (await quick.run(feeds("float32"), new Map())).arrays["update.y"]!;
    expect(asBytes(found)).toEqual(asBytes(expected));
    expect([...found.data].slice(0, 6)).toEqual([0, -0, NaN, NaN, Infinity, 0]);
  });

  it("that is fused with a product stays", () => {
    expect(faster(rectifier("fused"))).toBeNull();
  });

  it("of other numbers runs as it is", async () => {
    const graph = await new OnnxEngine(settings).load(portsOf("float64"), rectifier("float64"));
    const { arrays } = await graph.run(feeds("float64"), new Map());
    expect([...arrays["update.y"]!.data].slice(4, 9)).toEqual([Infinity, 0, 1e-45, 0, 3]);
  });
});

describe("the engine", () => {
  it("holds a tensor as it was given", async () => {
    const engine = new OnnxEngine(settings);
    const array = { dtype: "int64" as const, shape: [2, 1], data: BigInt64Array.of(1n << 62n, -1n) };
    const held = await engine.write(array);
    expect(await engine.read(held)).toEqual(array);
    engine.drop(new Map([["state.a", held]]));
  });

  it("gives integer sums, which are sent as such", async () => {
    const port = (role: string) => ({ name: `${role}.correct`, role, dtype: "int64", shape: [], mask: 0, ignored: null });
    const ports = { name: "finish", inputs: [port("state")], outputs: [port("update")], in_place: [], segments: [] } as unknown as Graph;
    const engine = new OnnxEngine(settings);
    const finish = await engine.load(ports, Uint8Array.from(Buffer.from(vectors.sums.finish, "base64")));
    const state = new Map([["state.correct", await engine.write({ dtype: "int64", shape: [], data: BigInt64Array.of((1n << 40n) + 3n) })]]);
    const { arrays } = await finish.run({}, state);
    const update = dump({ correct: arrays["update.correct"]! });
    expect(Buffer.from(update).toString("base64")).toBe(vectors.sums.update);
  });

  it("names the graph that it cannot load", async () => {
    const graph = { name: "train", inputs: [], outputs: [], in_place: [], segments: [] } as unknown as Graph;
    const loading = new OnnxEngine(settings).load(graph, Uint8Array.of(1, 2, 3));
    await expect(loading).rejects.toThrow(BundleError);
    await expect(loading).rejects.toThrow(/graph 'train'/);
  });

  it("takes no more bytes into a tensor than it has", async () => {
    const tensor = new HeldTensor(await instantiate(settings), { dtype: "float32", shape: [2] });
    expect(() => tensor.set({ dtype: "float32", shape: [3], data: new Float32Array(3) })).toThrow(/float32 \(2\) is given float32 \(3\)/);
  });

  it("says so where WebAssembly cannot be had, and waits for nothing", async () => {
    const folder = mkdtempSync(join(tmpdir(), "edgefl-ort-"));
    const script = "ort-wasm-simd-threaded.mjs";
    copyFileSync(fileURLToPath(new URL(script, ASSETS)), join(folder, script));
    // A module that imports what nobody gives: "x" "y".
    const odd = [0, 97, 115, 109, 1, 0, 0, 0, 1, 4, 1, 96, 0, 0, 2, 7, 1, 1, 120, 1, 121, 0, 0];
    writeFileSync(join(folder, "ort-wasm-simd-threaded.wasm"), Uint8Array.from(odd));
    vi.resetModules(); // compiled code is kept
    const { OnnxEngine: Fresh } = await import("../src/engine/onnx");
    const engine = new Fresh({ assets: `${pathToFileURL(folder).href}/`, threads: 1 });
    await expect(engine.write({ dtype: "float32", shape: [1], data: new Float32Array(1) })).rejects.toThrow(/x/);
  });

  it("with threads, whose instance stays, gives back what a round left", async () => {
    const engine = new OnnxEngine({ ...settings, threads: 2 });
    const large = { dtype: "float32" as const, shape: [1 << 22], data: new Float32Array(1 << 22) };
    await engine.write(large);
    const first = engine.bytes();
    for (let round = 0; round < 8; round++) {
      engine.rest();
      await engine.write(large);
    }
    expect(engine.bytes()).toBe(first);
  });

  it("gives the memory of an instance back when it lets it go", async () => {
    const held = await (async () => {
      const module = await instantiate(settings);
      new HeldTensor(module, { dtype: "float32", shape: [1 << 20] }).free();
      return new WeakRef(module.HEAPU8.buffer);
    })();
    for (let attempt = 0; attempt < 50 && held.deref(); attempt++) {
      await new Promise((resolve) => setTimeout(resolve, 20));
      collect();
    }
    expect(held.deref()).toBeUndefined();
  });
});
