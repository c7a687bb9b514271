/** Which rows a batch has: a pure function of (seed, stream, step), so that a round can be taken up at any step. */
import { Generator } from "./random";
import type { Rows } from "./samples";

/** Of batches, beside the streams of rows. */
const ORDER = 1 << 21;
const NOISE = 1 << 20;

export type Draws = "walk" | "draw" | "length";

/** Mini-batches of a round, `batch` rows each; with replacement if data are short. */
export class Batches {
  private readonly orders = new Map<number, Rows>();
  private readonly places = new Map<number, Rows>();

  constructor(
    private readonly seed: bigint,
    private readonly samples: number,
    private readonly batch: number,
    private readonly draws: Draws,
    /** Which of the lengths that there are graphs for each sample needs. */
    private readonly buckets: Int32Array | null = null,
  ) {}

  indices(stream: number, step: number): Rows {
    if (this.samples < this.batch) return new Generator(this.seed, stream, step).integers(this.samples, this.batch);
    if (this.draws === "draw") return new Generator(this.seed, stream, step).choice(this.samples, this.batch);
    const order = this.order(stream);
    const place = this.draws === "length" && this.buckets ? this.place(stream, step) : step;
    const start = place * this.batch;
    return Int32Array.from({ length: this.batch }, (_, at) => order[(start + at) % this.samples]!);
  }

  private order(stream: number): Rows {
    let order = this.orders.get(stream);
    if (order === undefined) {
      order = new Generator(this.seed, stream).permutation(this.samples);
      const buckets = this.draws === "length" ? this.buckets : null;
      if (buckets) order = Int32Array.from([...order].sort((one, other) => buckets[one]! - buckets[other]!));
      this.orders.set(stream, order);
    }
    return order;
  }

  private place(stream: number, step: number): number {
    const count = Math.ceil(this.samples / this.batch);
    let places = this.places.get(stream);
    if (places === undefined) {
      places = new Generator(this.seed, stream, ORDER).permutation(count);
      this.places.set(stream, places);
    }
    return places[step % count]!;
  }
}

/** Rows of step `step` of a pass over the data in their order; the last batch is filled from the first rows. */
export function passed(samples: number, batch: number, step: number): Rows {
  return Int32Array.from({ length: batch }, (_, at) => (step * batch + at) % samples);
}

/** 1 where a row is met for the first time, 0 where it only fills the batch. */
export function passMask(samples: number, batch: number, step: number): Float32Array {
  return Float32Array.from({ length: batch }, (_, at) => (step * batch + at < samples ? 1 : 0));
}

/** Uniform [0, 1) for one noise input of one step. */
export function noise(seed: bigint, step: number, port: number, count: number): Float32Array {
  return new Generator(seed, NOISE, step, port).floats(new Float32Array(count));
}
