/**
 * numpy's random numbers, bit for bit: Philox 4x64-10 seeded by SeedSequence, and what Generator draws from it
 * (docs/protocol.md, Random numbers). 64-bit words are pairs of unsigned 32-bit halves, as bigint would be far slower.
 */
const MASK = 0xffffffff;

/** 32-bit words of whole numbers, the lowest first; at least one each. */
function wordsOf(key: readonly (number | bigint)[]): number[] {
  const words: number[] = [];
  for (const each of key) {
    let rest = BigInt(each);
    do {
      words.push(Number(rest & 0xffffffffn));
      rest >>= 32n;
    } while (rest);
  }
  return words;
}

const times = (one: number, other: number): number => Math.imul(one, other) >>> 0;

/** SeedSequence(key).generate_state: the 32-bit words that seed a generator. */
export function seedWords(key: readonly (number | bigint)[], count: number): number[] {
  const entropy = wordsOf(key);
  let constant = 0x43b0d7e5;
  const hashed = (word: number): number => {
    let value = (word ^ constant) >>> 0;
    constant = times(constant, 0x931e8875);
    value = times(value, constant);
    return (value ^ (value >>> 16)) >>> 0;
  };
  const mixed = (one: number, other: number): number => {
    const value = (times(0xca01f9dd, one) - times(0x4973f715, other)) >>> 0;
    return (value ^ (value >>> 16)) >>> 0;
  };
  const pool = [0, 1, 2, 3].map((place) => hashed(entropy[place] ?? 0));
  for (let from = 0; from < 4; from++) {
    for (let to = 0; to < 4; to++) if (from !== to) pool[to] = mixed(pool[to]!, hashed(pool[from]!));
  }
  for (const word of entropy.slice(4)) for (let to = 0; to < 4; to++) pool[to] = mixed(pool[to]!, hashed(word));
  let out = 0x8b51f9dd;
  return Array.from({ length: count }, (_, place) => {
    let value = (pool[place % 4]! ^ out) >>> 0;
    out = times(out, 0x58f38ded);
    value = times(value, out);
    return (value ^ (value >>> 16)) >>> 0;
  });
}

/**
 * Words of the last product: 32 bits of a typed array, as variables would be objects. `at(0)` is the highest of a product of
 * 64-bit numbers, at(3) its lowest; of 32-bit numbers the high word is HIGH.
 */
const words = new Uint32Array(5);
const HIGH = 4;

/** The low half of a product of 32-bit numbers; the high one is left in words[HIGH]. */
function product(one: number, other: number): number {
  const a = one >>> 16;
  const b = one & 0xffff;
  const c = other >>> 16;
  const d = other & 0xffff;
  const middle = (Math.imul(a, d) >>> 0) + (Math.imul(b, d) >>> 16);
  const cross = (middle & 0xffff) + (Math.imul(b, c) >>> 0);
  words[HIGH] = (Math.imul(a, c) >>> 0) + (middle >>> 16) + (cross >>> 16);
  return Math.imul(one, other) >>> 0;
}

/** The product of two 64-bit numbers, in words 0 to 3. */
function wide(oneHigh: number, oneLow: number, otherHigh: number, otherLow: number): void {
  words[3] = product(oneLow, otherLow);
  let sum = words[HIGH]!;
  sum += product(oneLow, otherHigh);
  let upper = words[HIGH]!;
  sum += product(oneHigh, otherLow);
  upper += words[HIGH]!;
  words[2] = sum;
  upper += product(oneHigh, otherHigh) + (sum >= 8589934592 ? 2 : sum >= 4294967296 ? 1 : 0);
  words[1] = upper;
  words[0] = words[HIGH]! + (upper >= 8589934592 ? 2 : upper >= 4294967296 ? 1 : 0);
}

/** numpy.random.Generator(Philox(SeedSequence(key))). */
export class Generator {
  private readonly key: number[];
  private counter = 0;
  /** Eight 32-bit words of a block: each of its four numbers by its low half, then its high one. */
  private readonly block = new Uint32Array(8);
  private at = 8;

  constructor(...key: (number | bigint)[]) {
    this.key = seedWords(key, 4);
  }

  uint32(): number {
    if (this.at === 8) this.refill();
    return this.block[this.at++]!;
  }

  /** Uniform in [0, 1), float32, as many as `out` holds. */
  floats(out: Float32Array): Float32Array {
    for (let at = 0; at < out.length; at++) out[at] = (this.uint32() >>> 8) / 16777216;
    return out;
  }

  /** A whole number from 0 to `most`, below 2^32 (Lemire's method). */
  upTo(most: number): number {
    if (most === 0) return 0;
    if (most === MASK) return this.uint32();
    const count = most + 1;
    let low = product(this.uint32(), count);
    if (low < count) {
      const threshold = (MASK - most) % count;
      while (low < threshold) low = product(this.uint32(), count);
    }
    return words[HIGH]!;
  }

  /** `count` whole numbers below `end`. */
  integers(end: number, count: number): Int32Array {
    return Int32Array.from({ length: count }, () => this.upTo(end - 1));
  }

  /** The numbers below `count` in random order. */
  permutation(count: number): Int32Array {
    return shuffled(numbers(count), 1, (most) => this.within(most));
  }

  /** `count` different numbers below `end`, in random order: Generator.choice(end, count, replace=False). */
  choice(end: number, count: number): Int32Array {
    if (end > 10000 && count > Math.floor(end / 50)) {
      return shuffled(numbers(end), Math.max(end - count, 1), (most) => this.upTo(most)).slice(end - count);
    }
    const taken = new Set<number>();
    const found = new Int32Array(count);
    for (let most = end - count; most < end; most++) {
      const value = this.upTo(most);
      const fresh = taken.has(value) ? most : value;
      taken.add(fresh);
      found[most - end + count] = fresh;
    }
    return shuffled(found, 1, (most) => this.upTo(most));
  }

  /** A whole number from 0 to `most`: numbers of as many bits are drawn until one is in range. */
  private within(most: number): number {
    const mask = most === 0 ? 0 : MASK >>> Math.clz32(most);
    for (;;) {
      const value = (this.uint32() & mask) >>> 0;
      if (value <= most) return value;
    }
  }

  /** The next block: ten rounds over the counter (a, b, c, d; each a high and a low half). */
  private refill(): void {
    this.counter++;
    let k0 = this.key[0]!;
    let k1 = this.key[1]!;
    let k2 = this.key[2]!;
    let k3 = this.key[3]!;
    let a0 = this.counter >>> 0;
    let a1 = Math.floor(this.counter / 4294967296);
    let b0 = 0;
    let b1 = 0;
    let c0 = 0;
    let c1 = 0;
    let d0 = 0;
    let d1 = 0;
    for (let round = 0; round < 10; round++) {
      wide(0xd2e7470e, 0xe14c6c93, a1, a0);
      const e0 = words[3]!;
      const e1 = words[2]!;
      const f0 = words[1]!;
      const f1 = words[0]!;
      wide(0xca5a8263, 0x95121157, c1, c0);
      a0 = (words[1]! ^ b0 ^ k0) >>> 0;
      a1 = (words[0]! ^ b1 ^ k1) >>> 0;
      b0 = words[3]!;
      b1 = words[2]!;
      c0 = (f0 ^ d0 ^ k2) >>> 0;
      c1 = (f1 ^ d1 ^ k3) >>> 0;
      d0 = e0;
      d1 = e1;
      const first = k0 + 0x7f4a7c15;
      k1 = (k1 + 0x9e3779b9 + (first > MASK ? 1 : 0)) >>> 0;
      k0 = first >>> 0;
      const second = k2 + 0x84caa73b;
      k3 = (k3 + 0xbb67ae85 + (second > MASK ? 1 : 0)) >>> 0;
      k2 = second >>> 0;
    }
    const block = this.block;
    block[0] = a0;
    block[1] = a1;
    block[2] = b0;
    block[3] = b1;
    block[4] = c0;
    block[5] = c1;
    block[6] = d0;
    block[7] = d1;
    this.at = 0;
  }
}

function numbers(count: number): Int32Array {
  return Int32Array.from({ length: count }, (_, place) => place);
}

/** Each value from the last to place `first` changes places with one not behind it, which `draw` chooses. */
function shuffled(values: Int32Array, first: number, draw: (most: number) => number): Int32Array {
  for (let place = values.length - 1; place >= first; place--) {
    const other = draw(place);
    const value = values[place]!;
    values[place] = values[other]!;
    values[other] = value;
  }
  return values;
}
