/**
 * Images stretched bilinearly with the same bits as Pillow's, which the reference uses: where an image shrinks, each new pixel
 * is a weighted mean of all that it covers; columns first, then rows, in fixed point.
 */
const BITS = 22;

interface Weights {
  /** The first pixel that counts, for each new one. */
  first: Int32Array;
  /** Weights times 2^BITS of those from there on. */
  of: Int32Array[];
}

function weightsOf(from: number, to: number): Weights {
  const scale = from / to;
  const reach = Math.max(scale, 1);
  const first = new Int32Array(to);
  const of = Array.from({ length: to }, (_, place) => {
    const center = (place + 0.5) * scale;
    const start = Math.max(0, Math.trunc(center - reach + 0.5));
    const stop = Math.min(from, Math.trunc(center + reach + 0.5));
    first[place] = start;
    const shares = Array.from({ length: stop - start }, (_, at) => Math.max(0, 1 - Math.abs((at + start - center + 0.5) / reach)));
    const sum = shares.reduce((total, share) => total + share, 0);
    return Int32Array.from(shares, (share) => Math.trunc(0.5 + (sum ? share / sum : 0) * 2 ** BITS));
  });
  return { first, of };
}

/** One plane, (height, width) as bytes, in another size. */
export function resized(plane: Uint8Array, width: number, height: number, toWidth: number, toHeight: number): Uint8Array {
  const wide = width === toWidth ? plane : columns(plane, width, height, toWidth);
  return height === toHeight ? wide : rows(wide, toWidth, height, toHeight);
}

function columns(plane: Uint8Array, width: number, height: number, to: number): Uint8Array {
  const { first, of } = weightsOf(width, to);
  const out = new Uint8Array(height * to);
  for (let y = 0; y < height; y++) {
    for (let x = 0; x < to; x++) {
      const weights = of[x]!;
      const start = y * width + first[x]!;
      let sum = 1 << (BITS - 1);
      for (let at = 0; at < weights.length; at++) sum += plane[start + at]! * weights[at]!;
      out[y * to + x] = clipped(sum);
    }
  }
  return out;
}

function rows(plane: Uint8Array, width: number, height: number, to: number): Uint8Array {
  const { first, of } = weightsOf(height, to);
  const out = new Uint8Array(to * width);
  for (let y = 0; y < to; y++) {
    const weights = of[y]!;
    for (let x = 0; x < width; x++) {
      let sum = 1 << (BITS - 1);
      for (let at = 0; at < weights.length; at++) sum += plane[(first[y]! + at) * width + x]! * weights[at]!;
      out[y * width + x] = clipped(sum);
    }
  }
  return out;
}

const clipped = (sum: number): number => Math.min(255, Math.max(0, sum >> BITS));
