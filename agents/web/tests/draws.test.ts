/** What a device draws and reads, beside the reference's (tests/agents/web/vectors.py). */
import { describe, expect, it } from "vitest";
import { Batches, type Draws, noise, passed, passMask } from "../src/data/batches";
import { Generator, seedWords } from "../src/data/random";
import { resized } from "../src/data/resize";
import { asRead } from "../src/data/samples";
import vectors from "./vectors.json";

const SEED = (1n << 62n) + 1n;

describe("generators", () => {
  it.each(vectors.draws.map((each) => [each.key.join(", "), each] as const))("of (%s)", (_, each) => {
    const key = each.key.map(BigInt);
    const fresh = () => new Generator(...key);
    const words = fresh();
    expect(seedWords(key, 4)).toEqual(each.words);
    expect(each.uint32.map(() => words.uint32())).toEqual(each.uint32);
    expect([...fresh().permutation(37)]).toEqual(each.permutation);
    expect([...fresh().integers(5, 32)]).toEqual(each.integers);
    expect([...fresh().floats(new Float32Array(5))]).toEqual(each.floats);
    for (const { end, count, first, sum } of each.choices) {
      const found = fresh().choice(end, count);
      expect([...found.slice(0, 20)]).toEqual(first);
      expect(found.reduce((total, value, place) => total + value * place, 0)).toBe(sum);
    }
  });
});

describe("batches", () => {
  it.each(vectors.batches.map((each) => [each.draws, each.samples, each] as const))("%s of %d rows", (draws, samples, each) => {
    const buckets = each.buckets && Int32Array.from(each.buckets);
    const batches = new Batches(SEED, samples, each.batch, draws as Draws, buckets);
    for (const { stream, step, rows } of each.taken) expect([...batches.indices(stream, step)]).toEqual(rows);
  });

  it("of a pass over the data", () => {
    vectors.passes.forEach((each, step) => {
      expect([...passed(10, 4, step)]).toEqual(each.rows);
      expect([...passMask(10, 4, step)]).toEqual(each.mask);
    });
  });

  it("have the reference's noise", () => {
    expect([...noise(SEED, 5, 1, 6)]).toEqual(vectors.noise);
  });

  it("are scaled with the reference's rounding", () => {
    const samples = { dtype: "uint8" as const, shape: [1, 4], data: Uint8Array.of(0, 1, 127, 255) };
    const spec = {
      shape: [4], dtype: "float32", classes: 2, scale: 1 / 255, shift: -0.4914, below: 0, others: [], names: [], reader: null,
    };
    expect([...(asRead(samples, spec).data as Float32Array)]).toEqual(vectors.scaled);
  });
});

describe("images", () => {
  it.each(vectors.images.map((each) => [each.sizes.join(", "), each] as const))("of %s pixels are stretched as Pillow does", (_, each) => {
    const [width, height, toWidth, toHeight] = each.sizes as [number, number, number, number];
    expect([...resized(Uint8Array.from(each.pixels), width, height, toWidth, toHeight)]).toEqual(each.resized);
  });
});
