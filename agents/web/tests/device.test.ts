/** The store, who has a device, when it stands still, and where ops ran. */
import "fake-indexeddb/auto";
import { describe, expect, it, vi } from "vitest";
import { placementIn, placementText } from "../src/engine/placement";
import { BlobStore } from "../src/store/blobs";
import { takeUp } from "../src/round/resume";
import { choose } from "../src/store/carries";
import { Record } from "../src/store/records";
import type { Job, Outgoing } from "../src/store/rows";
import { Store } from "../src/store/store";
import { describe as described, split } from "../src/wire/blobs";
import type { Manifest } from "../src/wire/bundle/manifest";
import { RoundDeclined, StoreError } from "../src/wire/errors";
import { dump } from "../src/wire/tensors";
import { ConditionsMonitor } from "../src/worker/conditions";
import { holdDevice } from "../src/worker/lock";

let count = 0;
const opened = (name = `device-${count++}`, rounds = 1000) => Store.open("demo", name, rounds);

const outgoing = (nonce: string): Outgoing => ({ run: "run", round: 3, nonce, data: Uint8Array.of(1, 2), ask: false, shard: -1 });
const job: Job = {
  run: "run", round: 3, tier: "weak", seed: (1n << 62n) + 1n, nonce: "aa", samples: 0, model_version: "m",
  bundle: { sha256: "0".repeat(64), size: 1, chunk: 1, digests: new Uint8Array(), codec: "", raw: 0 }, units: {}, hyper: {},
  signature: new Uint8Array(), base: 2, format: "onnx", tries: 1, ask: false, progress_s: 0, shard: -1,
};
const past = (nonce: string, outcome: string) =>
  ({ run: "run", round: 3, tier: "weak", nonce, outcome, reason: "", text: "", loss: 0.5 });

describe("the store", () => {
  it("gives the next process the job with its seed, and the checkpoint", async () => {
    const first = await opened("killed");
    await first.keepJob(job);
    const state = { dtype: "float32" as const, shape: [2], data: Float32Array.of(1, 2) };
    await first.saveCheckpoint({ nonce: "aa", step: 4, sums: { loss: 2 }, basis: "b", tensors: [["state.w", state]] });
    first.close();
    const second = await opened("killed");
    expect(second.job?.seed).toBe(job.seed);
    expect((await second.checkpoint("aa"))?.tensors[0]?.[1].data).toEqual(state.data);
    expect(await second.checkpoint("bb")).toBeNull();
  });

  it("moves an update into the outbox and ends its job in one step", async () => {
    const store = await opened("outbox");
    await store.keepJob(job);
    await store.finishJob(outgoing("aa"), Uint8Array.of(9), "run/p/weak");
    store.close();
    const next = await opened("outbox");
    expect([next.job, next.waits("aa"), next.hasOutgoing]).toEqual([null, true, true]);
    expect((await next.outgoing())?.data).toEqual(Uint8Array.of(1, 2));
    expect(next.carries().map((carry) => [carry.name, carry.round, carry.waits])).toEqual([["run/p/weak", 3, true]]);
  });

  it("keeps the carry of an accepted update and drops that of a rejected one", async () => {
    const store = await opened();
    await store.finishJob(outgoing("aa"), Uint8Array.of(1), "run/p/weak");
    await store.finishJob(outgoing("bb"), Uint8Array.of(2), "run/p/weak");
    await store.settle(past("aa", "accepted"));
    await store.settle(past("bb", "rejected"));
    expect(store.carries().map((carry) => [carry.nonce, carry.waits])).toEqual([["aa", false]]);
    expect([store.past("bb")?.outcome, store.hasOutgoing]).toEqual(["rejected", false]);
  });

  it("forgets the oldest rounds beyond those that it may remember", async () => {
    const store = await opened("history", 2);
    for (const nonce of ["a", "b", "c"]) await store.settle(past(nonce, "accepted"));
    store.close();
    expect((await opened("history", 2)).history().map((each) => each.nonce)).toEqual(["b", "c"]);
  });

  it("drops the least recently used blobs, and refuses what never fits", async () => {
    const blobs = new BlobStore(await opened(), 100);
    const [one, other] = [await described(new Uint8Array(60), 30), await described(new Uint8Array(61).fill(1), 61)];
    for (const [index, piece] of split(new Uint8Array(60), 30).entries()) await blobs.put(one, index, piece);
    expect(await blobs.missing(one)).toEqual([]);
    await blobs.makeRoom([other]);
    expect(await blobs.missing(one)).toEqual([0, 1]);
    await expect(blobs.makeRoom([one, other])).rejects.toThrow(StoreError);
  });

  it("says what to do where the browser refuses one, or takes nothing more", async () => {
    const store = await opened();
    const full = new Proxy(store.db, {
      get: (db, name) => (name === "transaction" ? () => { throw new DOMException("no room", "QuotaExceededError"); } : Reflect.get(db, name)),
    });
    await expect(Object.assign(Object.create(store) as Store, { db: full }).keepJob(job)).rejects.toThrow(/free some space/);
    const open = indexedDB.open;
    indexedDB.open = () => { throw new DOMException("denied", "SecurityError"); };
    try {
      await expect(opened()).rejects.toThrow(/allow it to keep data/);
      await expect(holdDevice("edgefl:demo:refused", () => undefined)).rejects.toThrow(StoreError);
    } finally {
      indexedDB.open = open;
    }
  });

  it("keeps nothing of a write that fails in the middle", async () => {
    const store = await opened();
    const unclonable = { ...outgoing("aa"), data: (() => 0) as unknown as Uint8Array };
    await expect(store.finishJob(unclonable, null, "run/p/weak")).rejects.toThrow(StoreError);
    expect([store.hasOutgoing, await store.outgoing()]).toEqual([false, null]);
  });

  it("knows of no round that it could not keep", async () => {
    const store = await opened();
    const unclonable = (nonce: string) => ({ ...past(nonce, "accepted"), text: (() => 0) as unknown as string });
    await expect(store.decline(unclonable("aa"))).rejects.toThrow(StoreError);
    await expect(store.settle(unclonable("bb"))).rejects.toThrow(StoreError);
    expect(store.history()).toEqual([]);
  });

  it("has a record again that was sealed, for its own tag alone", async () => {
    const store = await opened();
    const record = await Record.create(store, 0, [3, 2], "float32", 2, 0);
    await record.write(0, { dtype: "float32", shape: [2, 2], data: Float32Array.of(1, 2, 3, 4) });
    await record.write(2, { dtype: "float32", shape: [1, 2], data: Float32Array.of(5, 6) });
    expect(await Record.reopen(store, 0, "tag", 2, 0)).toBeNull();
    await record.seal("tag");
    expect(await Record.reopen(store, 0, "another", 2, 0)).toBeNull();
    const again = (await Record.reopen(store, 0, "tag", 2, 0))!;
    expect([...(await again.rows(Int32Array.of(2, 0, 1))).data]).toEqual([5, 6, 1, 2, 3, 4]);
  });
});

describe("carries", () => {
  const carry = (id: number, round: number, waits = false) => ({ id, name: "run/p/weak", nonce: `${id}`, round, waits });
  const begun = { run: "run", name: "run/p/weak", round: 7, base: 5 };

  it("of abandoned rounds are void, and the newest that is left stands", () => {
    const choice = choose([carry(1, 4), carry(2, 5), carry(3, 6)], begun, 0);
    expect([choice.carry?.id, choice.void.map((each) => each.carry.id), choice.superseded.map((each) => each.id)]).toEqual([2, [3], [1]]);
  });

  it("stand beside one whose update may still be rejected", () => {
    expect(choose([carry(1, 4), carry(2, 5, true)], begun, 0).superseded).toEqual([]);
  });

  it("are good for so many completed rounds", () => {
    expect(choose([carry(1, 4)], begun, 1).void.map((each) => each.why)).toEqual([
      "it was good for 1 completed round after it, and round 5 is completed",
    ]);
  });

  const v = { name: "carry.v", role: "carry", dtype: "float32", shape: [3], mask: 0 };
  const listed = (changes: object = {}) =>
    ({ program: "p", start: "s", finish: "s", phases: [], graphs: [{ name: "s", inputs: [v] }], carry_any_tier: true, carry_exchanges: 0, carry_needed: false, ...changes }) as unknown as Manifest;
  /** A store with an accepted carry of each round, by tier: the number of its round, in `size` entries. */
  async function keeping(...left: [round: number, name: string, size?: number, label?: string][]): Promise<Store> {
    const store = await opened();
    for (const [round, name, size = 3, label = "v"] of left) {
      const array = { dtype: "float32" as const, shape: [size], data: new Float32Array(size).fill(round) };
      await store.finishJob({ ...outgoing(`${name}${round}`), round }, dump({ [label]: array }), name);
      await store.settle({ ...past(`${name}${round}`, "accepted"), round });
    }
    return store;
  }
  const told: string[] = [];
  /** The round that the one after `base` goes on from; nothing is zeros. */
  const begin = async (store: Store, base: number, manifest = listed()) =>
    (await takeUp(store, { ...job, round: base + 1, base }, manifest, (text) => void told.push(text))).arrays["v"]?.data[0];
  const kept = (store: Store) => store.carries().map((each) => each.round);

  it("of other tiers are used only if the manifest permits it, and stay", async () => {
    const store = await keeping([1, "run/p/strong"]);
    expect([await begin(store, 1, listed({ carry_any_tier: false })), await begin(store, 1)]).toEqual([undefined, 1]);
    expect([kept(store), told]).toEqual([[1], []]);
  });

  it("of all tiers compete, and the newest that fits is used", async () => {
    const store = await keeping([1, "run/p/weak"], [2, "run/p/strong"], [3, "run/p/huge", 5], [4, "run/p/huge", 3, "w"]);
    expect([await begin(store, 4), kept(store), told]).toEqual([2, [1, 2, 3, 4], []]);
    const own = await keeping([1, "run/p/strong"], [2, "run/p/weak"]);
    expect(await begin(own, 2)).toBe(2);
    const misfit = await keeping([1, "run/p/strong"], [2, "run/p/weak", 5]);
    expect([await begin(misfit, 2), kept(misfit)]).toEqual([1, [1]]);
    expect(told.splice(0)).toEqual([expect.stringContaining("round 3 goes on from what was kept of round 1")]);
  });

  it("of other tiers are not used once they are abandoned, expired, or of another run or program", async () => {
    const store = await keeping([1, "run/p/strong"], [2, "run/p/strong"]);
    expect(await begin(store, 1)).toBe(1);
    const once = listed({ carry_exchanges: 1 });
    expect([await begin(store, 2, once), await begin(store, 3, once)]).toEqual([2, undefined]);
    for (const name of ["run/other/strong", "former/p/strong", "run/p/a/strong"]) {
      expect(await begin(await keeping([1, name]), 1)).toBeUndefined();
    }
  });

  it("of another tier are enough where an algorithm needs one", async () => {
    const needing = listed({ carry_needed: true });
    await expect(begin(await keeping(), 1, needing)).rejects.toThrow(RoundDeclined);
    expect(await begin(await keeping([1, "run/p/strong"]), 1, needing)).toBe(1);
  });
});

describe("a device", () => {
  it("belongs to one tab at a time, and to the next after that, which is told that it waits", async () => {
    const told: string[] = [];
    const hold = (tab: string) => holdDevice("edgefl:demo:tab", () => void told.push(tab));
    const first = await hold("first");
    let second: (() => void) | null = null;
    const waiting = hold("second").then((release) => (second = release));
    await vi.waitFor(() => expect(told).toEqual(["second"]), 5000);
    expect(second).toBeNull();
    first();
    (await waiting)();
    (await hold("third"))();
    expect(told).toEqual(["second"]);
  });

  it("is never that of two tabs that ask at once", async () => {
    let [now, most] = [0, 0];
    await Promise.all(Array.from({ length: 4 }, async () => {
      const release = await holdDevice("edgefl:demo:crowd", () => undefined);
      most = Math.max(most, ++now);
      await new Promise((resolve) => setTimeout(resolve, 10));
      now--;
      release();
    }));
    expect(most).toBe(1);
  });

  it("stands still while it is hidden, on a low battery, or asked to; and work waits for its end", async () => {
    const told: (string | null)[] = [];
    const gate = new ConditionsMonitor({}, { hidden: true }, (reason) => void told.push(reason));
    let open = false;
    const waiting = gate.open().then(() => (open = true));
    gate.see({ hidden: false, battery: 0.1, charging: false });
    await Promise.resolve();
    expect([open, gate.reason]).toEqual([false, "battery"]);
    gate.see({ charging: true });
    await waiting;
    gate.ask(true);
    gate.free();
    expect(told).toEqual(["hidden", "battery", null, "asked"]);
  });

  it("goes on while hidden where its page says so", () => {
    expect(new ConditionsMonitor({ pauseHidden: false }, { hidden: true }, () => undefined).reason).toBeNull();
  });
});

describe("a profile of a run", () => {
  it("says which ops had no kernel on the card", () => {
    const event = (op: string, provider: string) =>
      `{"cat" : "Node","name" :"${op}_1_kernel_time","args" : {"provider" : "${provider}","op_name" : "${op}"}},`;
    const lines = ["[", event("Conv", "WebGpuExecutionProvider"), event("Gather", "CPUExecutionProvider"), "]"];
    expect(placementText("train", placementIn(lines))).toBe("graph 'train': 1 op on WebGpu, 1 op on CPU (Gather)");
    expect(placementText("train", placementIn([]))).toContain("does not say");
  });
});
