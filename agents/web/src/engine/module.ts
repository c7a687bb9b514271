/**
 * onnxruntime-web's WebAssembly by its C functions. The package's own API copies every tensor of every run into and out of
 * WebAssembly's memory, state too; with these, state stays where it is.
 */
import { BundleError } from "../wire/errors";

/** The functions of onnxruntime's module that are called here (its `wasm-types.ts`); pointers are 32 bits. */
export interface OrtModule {
  HEAPU8: Uint8Array;
  HEAP32: Int32Array;
  HEAPU32: Uint32Array;
  _malloc(bytes: number): number;
  _free(pointer: number): void;
  stackSave(): number;
  stackRestore(stack: number): void;
  stackAlloc(bytes: number): number;
  UTF8ToString(pointer: number): string;
  stringToUTF8(text: string, pointer: number, room: number): void;
  lengthBytesUTF8(text: string): number;
  _OrtInit(threads: number, logging: number): number;
  _OrtGetLastError(code: number, message: number): number;
  _OrtCreateSessionOptions(
    level: number, arena: boolean, pattern: boolean, mode: number, profiling: boolean, prefix: number, id: number,
    severity: number, verbosity: number, optimized: number,
  ): number;
  _OrtAddSessionConfigEntry(options: number, key: number, value: number): number;
  _OrtReleaseSessionOptions(options: number): number;
  _OrtCreateSession(data: number, length: number, options: number): number | Promise<number>;
  _OrtReleaseSession(session: number): number;
  _OrtGetInputOutputCount(session: number, inputs: number, outputs: number): number;
  _OrtGetInputOutputMetadata(session: number, index: number, name: number, metadata: number): number;
  _OrtFree(pointer: number): number;
  _OrtCreateTensor(type: number, data: number, length: number, dims: number, rank: number, location: number): number;
  _OrtReleaseTensor(tensor: number): number;
  _OrtCreateRunOptions(severity: number, verbosity: number, terminate: boolean, tag: number): number;
  _OrtReleaseRunOptions(options: number): number;
  _OrtRun(
    session: number, inputNames: number, inputs: number, inputCount: number, outputNames: number, outputCount: number,
    outputs: number, options: number,
  ): number | Promise<number>;
}

type Factory = (options: Record<string, unknown>) => Promise<OrtModule>;

const FATAL = 4;
/** Of WebAssembly's memory. */
const ADDRESSES = 2 ** 32;

/** Where the module's two files lie, and with how many threads it runs. */
export interface ModuleSettings {
  /** URL of the folder, with a slash at its end. */
  assets: string;
  threads: number;
}

/** The compiled code, which is kept: another instance then takes some milliseconds. */
let compiled: Promise<WebAssembly.Module> | null = null;

/** A fresh instance with memory of its own. */
export async function instantiate(settings: ModuleSettings): Promise<OrtModule> {
  const script = `${settings.assets}ort-wasm-simd-threaded.mjs`;
  const binary = `${settings.assets}ort-wasm-simd-threaded.wasm`;
  const { default: factory } = (await import(/* @vite-ignore */ script)) as { default: Factory };
  compiled ??= compile(binary);
  const code = await compiled.catch((error: unknown) => {
    compiled = null;
    throw error;
  });
  const start = () => new Promise<OrtModule>((resolve, reject) => {
    factory({
      numThreads: settings.threads,
      locateFile: (name: string) => `${settings.assets}${name}`,
      // The factory hears of an instance alone: without one it would wait for ever.
      instantiateWasm(imports: WebAssembly.Imports, done: (instance: WebAssembly.Instance, code: WebAssembly.Module) => void) {
        WebAssembly.instantiate(code, imports).then((instance) => done(instance, code)).catch(reject);
        return {};
      },
    }).then(resolve, reject);
  });
  const module = settings.threads > 1 ? await start() : await withoutWaiting(start);
  check(module, module._OrtInit(settings.threads, FATAL), "onnxruntime cannot be started");
  return module;
}

/**
 * An instance waits for messages of its threads for ever, and what is waited for is never given back: of one without
 * threads, all its memory would stay, round after round. It does not wait where it does not find how to.
 */
async function withoutWaiting<T>(work: () => Promise<T>): Promise<T> {
  const shared = Atomics as { waitAsync?: unknown };
  const kept = shared.waitAsync;
  shared.waitAsync = undefined;
  try {
    return await work();
  } finally {
    shared.waitAsync = kept;
  }
}

async function compile(url: string): Promise<WebAssembly.Module> {
  if (url.startsWith("file:")) {
    const files = "node:fs/promises"; // of Node, for tests: a variable, so that no bundler looks for it
    const { readFile } = (await import(/* @vite-ignore */ files)) as typeof import("node:fs/promises");
    return WebAssembly.compile(await readFile(new URL(url)));
  }
  const answer = await fetch(url);
  if (!answer.ok) throw new BundleError(`onnxruntime's code cannot be loaded from ${url}: the server answers ${answer.status}`);
  const typed = answer.headers.get("content-type")?.startsWith("application/wasm") ?? false;
  return typed ? WebAssembly.compileStreaming(answer) : WebAssembly.compile(await answer.arrayBuffer());
}

/** BundleError with what onnxruntime says, where `code` is none of success. */
export function check(module: OrtModule, code: number, what: string): void {
  if (code !== 0) throw new BundleError(`${what}: ${lastError(module)}`);
}

export function lastError(module: OrtModule): string {
  const stack = module.stackSave();
  const place = module.stackAlloc(8);
  module._OrtGetLastError(place, place + 4);
  const message = module.HEAPU32[(place >>> 2) + 1]!;
  module.stackRestore(stack);
  return message ? module.UTF8ToString(message) : "it does not say why";
}

/** Memory of the module; BundleError where there is none left. */
export function allocate(module: OrtModule, bytes: number): number {
  const pointer = bytes < ADDRESSES ? module._malloc(Math.max(1, bytes)) >>> 0 : 0;
  if (!pointer) throw new BundleError(`WebAssembly has no memory for ${bytes} bytes: give this device a smaller tier`);
  return pointer;
}

/** A text in the module's memory, to be freed. */
export function textIn(module: OrtModule, text: string): number {
  const room = module.lengthBytesUTF8(text) + 1;
  const pointer = allocate(module, room);
  module.stringToUTF8(text, pointer, room);
  return pointer;
}
