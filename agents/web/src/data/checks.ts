/** Whether the values of arrays are those that a model takes. */
import { type Arr, type Dtype, fromHalf, isFloat } from "../wire/arrays";
import { DataError } from "../wire/errors";

const RANGES: Partial<Record<Dtype, [number, number]>> = {
  bool: [0, 1], int8: [-128, 127], int16: [-32768, 32767], int32: [-2147483648, 2147483647], uint8: [0, 255],
  uint16: [0, 65535], uint32: [0, 4294967295], uint64: [0, Infinity],
};

function rangeOf(array: Arr): [number, number] {
  const values = array.data as ArrayLike<number | bigint>;
  let [least, most] = [Infinity, -Infinity];
  for (let at = 0; at < values.length; at++) {
    const value = Number(values[at]);
    if (value < least) least = value;
    if (value > most) most = value;
  }
  return [least, most];
}

/** DataError where whole numbers are beyond what `dtype` holds. */
export function checkRange(name: string, array: Arr, dtype: Dtype, source: string): void {
  const [lowest, highest] = RANGES[dtype] ?? [-Infinity, Infinity];
  const [least, most] = rangeOf(array);
  if (least < lowest || most > highest) {
    throw new DataError(`${source}: ${name} go from ${least} to ${most}, the model takes ${dtype}, ${lowest} to ${highest}`);
  }
}

/** DataError where whole numbers are not 0 to `below` - 1: a vocabulary has no such token. */
export function checkBelow(name: string, array: Arr, below: number, source: string): void {
  if (!below) return;
  const [least, most] = rangeOf(array);
  if (least < 0 || most >= below) {
    throw new DataError(
      `${source}: ${name} go from ${least} to ${most}, the model takes whole numbers from 0 to ${below - 1}: prepare the ` +
        "data with the vocabulary of the federation",
    );
  }
}

/** DataError where values are NaN or infinite: a loss would show them as training that diverged. */
export function checkFinite(name: string, array: Arr, source: string, remedy = "repair or remove such rows"): void {
  if (!isFloat(array.dtype)) return;
  const half = array.dtype === "float16";
  const values = array.data as ArrayLike<number>;
  const width = Math.max(1, values.length / Math.max(1, array.shape[0] ?? 1));
  for (let at = 0; at < values.length; at++) {
    if (Number.isFinite(half ? fromHalf(values[at]!) : values[at])) continue;
    const row = Math.floor(at / width);
    throw new DataError(`${source}: a value of ${name} is NaN or infinite, first at row ${row}: ${remedy} (rows count from 0)`);
  }
}
