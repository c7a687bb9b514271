// Runs one graph in onnxruntime-web's WebAssembly backend on one thread, as a page would:
//
//   node run.mjs FOLDER [STEPS]
//
// FOLDER holds graph.onnx, inputs.json ([{name, dtype, shape}]) and inputs.bin (their values, one after another).
// An output named like an input plus ".next" is fed back into that input before the next step. What the last step
// gave is written to outputs.json ({load_ms, step_ms, outputs}) and outputs.bin, in the order of the graph.
import { readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import * as ort from "onnxruntime-web/wasm";

const REWRITTEN = ".next";
const ARRAYS = {
  bool: Uint8Array,
  uint8: Uint8Array,
  int32: Int32Array,
  int64: BigInt64Array,
  float32: Float32Array,
  float64: Float64Array,
};

function readTensors(folder) {
  const bytes = readFileSync(join(folder, "inputs.bin"));
  const feeds = {};
  let start = 0;
  for (const { name, dtype, shape } of JSON.parse(readFileSync(join(folder, "inputs.json"), "utf8"))) {
    const kind = ARRAYS[dtype];
    if (kind === undefined) throw new Error(`input ${name} is ${dtype}; known are ${Object.keys(ARRAYS)}`);
    const stop = start + shape.reduce((product, extent) => product * extent, kind.BYTES_PER_ELEMENT);
    feeds[name] = new ort.Tensor(dtype, new kind(Uint8Array.from(bytes.subarray(start, stop)).buffer), shape);
    start = stop;
  }
  return feeds;
}

function writeTensors(folder, names, results, times) {
  const outputs = names.map((name) => ({ name, dtype: results[name].type, shape: results[name].dims }));
  const values = names.map((name) => results[name].data);
  writeFileSync(join(folder, "outputs.json"), JSON.stringify({ ...times, outputs }));
  writeFileSync(
    join(folder, "outputs.bin"),
    Buffer.concat(values.map((data) => Buffer.from(data.buffer, data.byteOffset, data.byteLength))),
  );
}

async function main(folder, steps) {
  ort.env.wasm.numThreads = 1;
  let start = performance.now();
  const options = { executionProviders: ["wasm"], logSeverityLevel: 3 };
  const session = await ort.InferenceSession.create(readFileSync(join(folder, "graph.onnx")), options);
  const times = { load_ms: performance.now() - start, step_ms: [] };
  const feeds = readTensors(folder);
  let results = {};
  for (let step = 0; step < steps; step++) {
    start = performance.now();
    results = await session.run(feeds);
    times.step_ms.push(performance.now() - start);
    for (const name of session.outputNames) {
      const port = name.endsWith(REWRITTEN) ? name.slice(0, -REWRITTEN.length) : "";
      if (port in feeds) feeds[port] = results[name];
    }
  }
  writeTensors(folder, session.outputNames, results, times);
}

await main(process.argv[2], Number(process.argv[3] ?? 1));
