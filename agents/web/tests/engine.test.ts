/** onnxruntime's module as the engine calls it. */
import { setFlagsFromString } from "node:v8";
import { runInNewContext } from "node:vm";
import { describe, expect, it } from "vitest";
import { instantiate } from "../src/engine/module";
import { OnnxEngine } from "../src/engine/onnx";
import { HeldTensor } from "../src/engine/tensor";
import { BundleError } from "../src/wire/errors";
import type { Graph } from "../src/wire/bundle/graphs";

const ASSETS = new URL("../node_modules/onnxruntime-web/dist/", import.meta.url).href;
const settings = { assets: ASSETS, threads: 1 };
setFlagsFromString("--expose-gc");
const collect = runInNewContext("gc") as () => void;

describe("the engine", () => {
  it("holds a tensor as it was given", async () => {
    const engine = new OnnxEngine(settings);
    const array = { dtype: "int64" as const, shape: [2, 1], data: BigInt64Array.of(1n << 62n, -1n) };
    const held = await engine.write(array);
    expect(await engine.read(held)).toEqual(array);
    engine.drop(new Map([["state.a", held]]));
  });

  it("names the graph that it cannot load", async () => {
    const graph = { name: "train", inputs: [], outputs: [], in_place: [], segments: [] } as unknown as Graph;
    const loading = new OnnxEngine(settings).load(graph, Uint8Array.of(1, 2, 3));
    await expect(loading).rejects.toThrow(BundleError);
    await expect(loading).rejects.toThrow(/graph 'train'/);
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
