/** One session of onnxruntime: inputs are found by name, outputs by position. */
import { BundleError } from "../wire/errors";
import type { Graph, Port } from "../wire/bundle/graphs";
import { allocate, check, type OrtModule } from "./module";
import { dtypeName, type HeldTensor } from "./tensor";

interface Found {
  name: number;
  text: string;
  dtype: string;
  dims: (number | string)[];
}

export class Session {
  private readonly names: number[];
  private readonly order: number[];
  private readonly table: number;
  private readonly options: number;

  constructor(private readonly module: OrtModule, graph: Graph, private readonly handle: number) {
    const stack = module.stackSave();
    const place = module.stackAlloc(8);
    check(module, module._OrtGetInputOutputCount(handle, place, place + 4), "the session has no ports");
    const [inputs, outputs] = [module.HEAPU32[place >>> 2]!, module.HEAPU32[(place >>> 2) + 1]!];
    module.stackRestore(stack);
    const found = Array.from({ length: inputs + outputs }, (_, index) => portOf(module, handle, index));
    const read = found.slice(0, inputs);
    const left = found.slice(inputs);
    const problem = differenceOf(graph, read, left);
    if (problem) {
      module._OrtReleaseSession(handle);
      throw new BundleError(`graph '${graph.name}' and its manifest disagree on ${problem}: export the bundle again`);
    }
    this.order = read.map((each) => graph.inputs.findIndex((port) => port.name === each.text));
    this.names = found.map((each) => each.name);
    this.table = allocate(module, 8 * found.length);
    this.options = module._OrtCreateRunOptions(4, 0, false, 0);
  }

  /** `read` are the inputs in the manifest's order, `written` the outputs; both keep their memory. */
  async run(read: readonly HeldTensor[], written: readonly HeldTensor[]): Promise<void> {
    const { module, table, order } = this;
    const count = order.length;
    const cells = module.HEAPU32;
    const base = table >>> 2;
    const names = this.names;
    names.forEach((name, place) => (cells[base + place] = name));
    order.forEach((port, place) => (cells[base + names.length + place] = read[port]!.handle));
    written.forEach((tensor, place) => (cells[base + names.length + count + place] = tensor.handle));
    const values = table + 4 * names.length;
    const code = await module._OrtRun(
      this.handle, table, values, count, table + 4 * count, written.length, values + 4 * count, this.options,
    );
    check(module, code, "onnxruntime fails at a step");
  }

  release(): void {
    this.module._free(this.table);
    this.names.forEach((name) => this.module._OrtFree(name));
    this.module._OrtReleaseRunOptions(this.options);
    this.module._OrtReleaseSession(this.handle);
  }
}

function portOf(module: OrtModule, session: number, index: number): Found {
  const stack = module.stackSave();
  const place = module.stackAlloc(8);
  check(module, module._OrtGetInputOutputMetadata(session, index, place, place + 4), "a port has no type");
  const name = module.HEAPU32[place >>> 2]!;
  const about = module.HEAPU32[(place >>> 2) + 1]!;
  module.stackRestore(stack);
  const cells = module.HEAPU32;
  const rank = cells[(about >>> 2) + 1]!;
  const dims = Array.from({ length: rank }, (_, axis) => {
    const symbol = cells[(about >>> 2) + 2 + axis]!;
    return symbol ? module.UTF8ToString(symbol) : module.HEAP32[(about >>> 2) + 2 + rank + axis]!;
  });
  const dtype = dtypeName(module.HEAP32[about >>> 2]!);
  module._OrtFree(about);
  return { name, text: module.UTF8ToString(name), dtype, dims };
}

/** What onnxruntime says of the ports where it contradicts the manifest; "" where it does not. */
function differenceOf(graph: Graph, read: Found[], left: Found[]): string {
  const listed = new Set(graph.inputs.map((port) => port.name));
  const there = new Set(read.map((each) => each.text));
  const wrong = [...listed].filter((name) => !there.has(name)).concat([...there].filter((name) => !listed.has(name)));
  for (const each of read) {
    const port = graph.inputs.find((one) => one.name === each.text);
    if (port) wrong.push(differs(port, each));
  }
  if (left.length !== graph.outputs.length) wrong.push(`${left.length} outputs instead of ${graph.outputs.length}`);
  else left.forEach((each, place) => wrong.push(differs(graph.outputs[place]!, each)));
  return wrong.filter(Boolean).slice(0, 5).join("; ");
}

/** Sizes that are not known contradict nothing. */
function differs(port: Port, found: Found): string {
  const alike = found.dims.length === port.shape.length &&
    found.dims.every((extent, axis) => typeof extent !== "number" || extent < 0 || extent === port.shape[axis]);
  if (found.dtype === port.dtype && alike) return "";
  return `${found.text}: ${port.dtype} (${port.shape}) listed, ${found.dtype} (${found.dims}) in the graph`;
}
