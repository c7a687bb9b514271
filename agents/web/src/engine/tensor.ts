/** Tensors in WebAssembly's memory, by their address. */
import { type Arr, asBytes, bytesOf, type Dtype, zeros } from "../wire/arrays";
import { BundleError } from "../wire/errors";
import { allocate, lastError, type OrtModule } from "./module";

const TYPES: Record<Dtype, number> = {
  float32: 1, uint8: 2, int8: 3, uint16: 4, int16: 5, int32: 6, int64: 7, bool: 9, float16: 10, float64: 11, uint32: 12,
  uint64: 13,
};
const NAMES = new Map(Object.entries(TYPES).map(([name, code]) => [code, name]));
const CPU = 1;
/** Those of each module that are not freed. */
const held = new WeakMap<OrtModule, Set<HeldTensor>>();

/** Free what is left of a module's tensors: a round that is aborted leaves its state. */
export function freeAll(module: OrtModule): void {
  for (const tensor of held.get(module) ?? []) tensor.free();
}

/** numpy's name of one of onnxruntime's element types. */
export const dtypeName = (code: number): string => NAMES.get(code) ?? `type ${code}`;

/** One tensor: memory that is ours, and onnxruntime's handle of it. */
export class HeldTensor {
  readonly dtype: Dtype;
  readonly shape: number[];
  readonly bytes: number;
  private readonly pointer: number;
  readonly handle: number;

  constructor(private readonly module: OrtModule, port: { dtype: string; shape: readonly number[] }) {
    this.dtype = port.dtype as Dtype;
    this.shape = [...port.shape];
    this.bytes = bytesOf(port);
    this.pointer = allocate(module, this.bytes);
    const stack = module.stackSave();
    const dims = module.stackAlloc(4 * Math.max(1, this.shape.length));
    this.shape.forEach((extent, axis) => {
      module.HEAPU32[(dims >>> 2) + axis] = extent;
    });
    this.handle = module._OrtCreateTensor(TYPES[this.dtype], this.pointer, this.bytes, dims, this.shape.length, CPU);
    module.stackRestore(stack);
    if (!this.handle) {
      module._free(this.pointer);
      throw new BundleError(`onnxruntime takes no tensor of ${this.dtype} (${this.shape}): ${lastError(module)}`);
    }
    if (!held.has(module)) held.set(module, new Set());
    held.get(module)!.add(this);
  }

  /** BundleError for other than as many bytes: beside them lies other memory. */
  set(array: Arr): void {
    if (array.data.byteLength !== this.bytes) {
      throw new BundleError(`a tensor of ${this.dtype} (${this.shape}) is given ${array.dtype} (${array.shape}): export the bundle again`);
    }
    this.module.HEAPU8.set(asBytes(array), this.pointer);
  }

  /** A copy. */
  get(): Arr {
    const array = zeros(this.dtype, this.shape);
    asBytes(array).set(this.module.HEAPU8.subarray(this.pointer, this.pointer + this.bytes));
    return array;
  }

  free(): void {
    if (!held.get(this.module)?.delete(this)) return;
    this.module._OrtReleaseTensor(this.handle);
    this.module._free(this.pointer);
  }
}
