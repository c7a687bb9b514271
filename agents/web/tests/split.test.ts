/** The rows that a bundle uses, beside those of held_out.json, which other agents are held against, too. */
import { describe, expect, it } from "vitest";
import held from "../../../conformance/edgefl_conformance/data/golden/held_out.json";
import { LocalArrays, type Rows } from "../src/data/samples";
import { fitRows } from "../src/data/split";
import { type Arr, type Dtype, fromBytes } from "../src/wire/arrays";
import type { DataSpec, Manifest, Split } from "../src/wire/bundle/manifest";
import { fromHex } from "../src/wire/digests";
import { DataError } from "../src/wire/errors";

const SPEC = { classes: 2, scale: 1, shift: 0, below: 0, others: [], names: [], reader: null };
const manifestOf = (spec: Partial<DataSpec> & Pick<DataSpec, "shape" | "dtype">, split?: Split): Manifest => {
  const batch = { name: "batch.0.y", role: "batch", dtype: "int64", shape: [4], mask: 0, ignored: null };
  const graphs = [{ name: "evaluate", inputs: [batch] }];
  return { data: { ...SPEC, ...spec }, phases: [], evaluate: "evaluate", graphs, split } as unknown as Manifest;
};
const upTo = (count: number): Rows => Int32Array.from({ length: count }, (_, row) => row);
const numbered = (count: number): Arr => ({ dtype: "int64", shape: [count], data: BigInt64Array.from(upTo(count), BigInt) });

describe("held-out rows", () => {
  it.each(held.map((each) => [each.arrays.x.dtype, each] as const))("of %s are those of the protocol", async (_, each) => {
    const stored = Object.entries(each.arrays as Record<string, { dtype: string; shape: number[]; bytes: string }>);
    const arrays = Object.fromEntries(
      stored.map(([name, { dtype, shape, bytes }]) => [name, fromBytes(dtype as Dtype, shape, fromHex(bytes))]),
    );
    const count = each.arrays.x.shape[0]!;
    const source = LocalArrays.of({ ...arrays, y: numbered(count) }, "rows");
    const spec = { ...each.data, others: (each.data.others ?? []).map((one) => ({ below: 0, ...one })) };
    const rowsOf = async (part: Split["part"]) => {
      const data = await fitRows(source, manifestOf(spec, { share: each.share, seed: BigInt(each.seed), part }));
      return [...data.labels(upTo(data.count)).data].map(Number);
    };
    const kept = [...upTo(count)].filter((row) => !each.held_out.includes(row));
    expect([await rowsOf("held-out"), await rowsOf("train")]).toEqual([each.held_out, kept]);
  });
});

describe("the rows of a part", () => {
  const tokens: Arr = { dtype: "int64", shape: [40, 3], data: BigInt64Array.from({ length: 120 }, (_, at) => BigInt(at % 3 && at % 7)) };
  const age: Arr = { dtype: "float32", shape: [40], data: Float32Array.from(upTo(40)) };
  const y: Arr = { dtype: "int64", shape: [40], data: BigInt64Array.from(upTo(40), (row) => BigInt(row % 3)) };
  const source = LocalArrays.of({ x: tokens, y, age }, "rows");
  const spec = { shape: [3], dtype: "int64", classes: 3, below: 9, others: [{ name: "age", shape: [], dtype: "float32", below: 0 }] };
  const split: Split = { share: 0.4, seed: 3n, part: "held-out" };

  it("have their samples, labels, lengths and classes, and are cut behind the split", async () => {
    const whole = await fitRows(source, manifestOf(spec));
    const part = await fitRows(source, manifestOf(spec, split));
    const at = Int32Array.from(part.other("age", upTo(part.count)).data as Float32Array);
    expect([part.count > 3, part.count < 40]).toEqual([true, true]);
    expect(await part.rows(upTo(part.count))).toEqual(await whole.rows(at));
    expect(part.labels(upTo(part.count))).toEqual(whole.labels(at));
    expect(part.lengths).toEqual(at.map((row) => whole.lengths[row]!));
    const few = part.first(3);
    const counts = [0, 1, 2].map((label) => BigInt([...at.slice(0, 3)].filter((row) => row % 3 === label).length));
    expect([few.count, ...few.facts()["class_counts"]!.data]).toEqual([3, ...counts]);
    expect((await few.rows(upTo(3))).data).toEqual((await whole.rows(at.slice(0, 3))).data);
  });

  it("are looked for once in a page's life", async () => {
    let read = 0;
    const counting = {
      source: "rows", count: 40,
      async fitted(...wanted: Parameters<LocalArrays["fitted"]>) {
        const data = await source.fitted(...wanted);
        const rows = data.rows.bind(data);
        data.rows = (indices) => (read++, rows(indices));
        return data;
      },
    };
    const first = await fitRows(counting, manifestOf(spec, split));
    const again = await fitRows(counting, manifestOf(spec, split));
    await fitRows(counting, manifestOf(spec, { ...split, part: "train" }));
    expect([read, again.count]).toEqual([1, first.count]);
    await fitRows(counting, manifestOf(spec, { ...split, seed: 4n }));
    expect(read).toBe(2);
  });

  it("are no empty part", async () => {
    const one = LocalArrays.of({ x: { dtype: "float32", shape: [1, 1], data: new Float32Array(1) }, y: numbered(1) }, "one row");
    const parts = (["train", "held-out"] as const).map((part) =>
      fitRows(one, manifestOf({ shape: [1], dtype: "float32", classes: 1 }, { share: 0.5, seed: 0n, part })));
    const failed = (await Promise.allSettled(parts)).filter((each) => each.status === "rejected");
    expect(failed.map((each) => each.reason)).toEqual([expect.any(DataError)]);
  });
});
