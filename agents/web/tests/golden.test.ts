/** The frozen vectors of tests/wire/golden: what every implementation of the protocol must read and write. */
import { existsSync, readFileSync } from "node:fs";
import { join } from "node:path";
import { describe, expect, it } from "vitest";
import { asBytes } from "../src/wire/arrays";
import { fromGaps } from "../src/wire/bits";
import { BlobRef, checkRef } from "../src/wire/blobs";
import { unpacked } from "../src/wire/compression";
import { hex, utf8 } from "../src/wire/digests";
import { MessageCounter, MessageSigner, unwrap, verified } from "../src/wire/envelope";
import { BundleError, ProtocolError } from "../src/wire/errors";
import { keyPair } from "../src/wire/keys";
import { decodeManifest, Manifest } from "../src/wire/bundle/manifest";
import { isOlder, isRelease } from "../src/wire/bundle/releases";
import {
  Ack, Decline, Hello, type Kind, Page, Progress, read, Round, Status, Task, Update, UpdateChunk, written,
} from "../src/wire/messages";
import { decode, Float, type Value } from "../src/wire/msgpack";
import { patched } from "../src/wire/patches";
import { decoded, encoded } from "../src/wire/schema";
import { dump, load } from "../src/wire/tensors";
import { Topics } from "../src/wire/topics";

const ROOT = join(import.meta.dirname, "../../..");
const FOLDER = ["conformance/edgefl_conformance/data/golden", "tests/wire/golden"].map((each) => join(ROOT, each)).find((each) => existsSync(each))!;
const bytes = (name: string): Uint8Array => new Uint8Array(readFileSync(join(FOLDER, `${name}.bin`)));
const values = JSON.parse(readFileSync(join(FOLDER, "values.json"), "utf8")) as Record<string, unknown>;

const KINDS: [Kind<any>, string[]][] = [
  [Round, ["round_open", "round_with_mirrors", "round_live", "round_live_paged", "round_paged"]],
  [Status, ["status_online", "status_offline"]],
  [Hello, ["hello"]],
  [Task, ["task"]],
  [Progress, ["progress"]],
  [Update, ["update"]],
  [UpdateChunk, ["update_chunk"]],
  [Ack, ["ack_accepted", "ack_missing", "ack_rejected"]],
  [Decline, ["decline"]],
];

/** A value as values.json has it. */
function plain(value: Value): unknown {
  if (value instanceof Float) return Number.isFinite(value.value) ? value.value : null;
  if (typeof value === "bigint") return { int: String(value) };
  if (value instanceof Uint8Array) return { hex: hex(value) };
  if (Array.isArray(value)) return value.map(plain);
  if (value instanceof Map) return Object.fromEntries([...value].map(([key, each]) => [String(key), plain(each)]));
  return value;
}

describe("messages", () => {
  it.each(Object.keys(values))("%s is read as values.json says", (name) => {
    expect(plain(decode(bytes(name.replace(".bin", ""))))).toEqual(values[name]);
  });

  for (const [kind, names] of KINDS) {
    it.each(names)(`${kind.name}: %s is written again byte by byte`, (name) => {
      expect(hex(written(kind, read(kind, bytes(name))))).toBe(hex(bytes(name)));
    });
  }

  it("passes over fields that it does not know", () => {
    expect(read(Task, bytes("task_with_unknown_field"))).toEqual(read(Task, bytes("task")));
  });

  it("refuses another version", () => {
    expect(() => read(Task, bytes("task_of_version_2"))).toThrow(/version 2/);
    expect(() => decodeManifest(bytes("manifest_of_version_2"))).toThrow(/version 2/);
  });

  it("keeps a seed of 62 bits", () => {
    expect(read(Task, bytes("task")).seed).toBe((1n << 62n) + 1n);
  });

  it.each([["an int written as 3.0", 0xcb, [0x40, 8, 0, 0, 0, 0, 0, 0]], ["nil", 0xc0, []]])(
    "refuses %s in the place of an int", (_, head, rest) => {
      const wrong = Uint8Array.from([0x81, 0xa5, ...new TextEncoder().encode("round"), head, ...rest]);
      expect(() => read(Decline, wrong)).toThrow(ProtocolError);
    });

  it("writes floats as floats of 64 bits, also whole ones", () => {
    const grown = { ...read(Progress, bytes("progress")), loss: 3 };
    const value = decode(written(Progress, grown)) as Map<string, Value>;
    expect(value.get("loss")).toEqual(new Float(3));
    expect(read(Progress, written(Progress, grown)).loss).toBe(3);
  });

  it("reads what a page offers", () => {
    expect(Object.keys(decoded(Page, bytes("round_page")).offers)).toEqual(["onnx"]);
  });

  it.each(["blobref_one_chunk", "blobref_three_chunks", "blobref_empty", "blobref_zstd"])("%s", (name) => {
    const ref = decoded(BlobRef, bytes(name));
    expect(hex(encoded(BlobRef, ref))).toBe(hex(bytes(name)));
    expect(() => checkRef(ref, 2 ** 30)).not.toThrow();
    expect(() => checkRef({ ...ref, sha256: "no" }, 2 ** 30)).toThrow(BundleError);
    const wide = { ...ref, size: 1, chunk: 2 ** 30, digests: new Uint8Array() };
    expect(() => checkRef(wide, 2 ** 31)).toThrow(BundleError);
  });

  it("has the reference's topics", () => {
    const listed = new TextDecoder().decode(bytes("topics")).split("\n");
    const topics = new Topics("demo", "phone-7");
    for (const topic of [topics.currentRound, topics.status, topics.hello, topics.tasks, topics.acks, topics.declines, topics.progress]) {
      expect(listed).toContain(topic);
    }
  });
});

describe("envelopes", () => {
  const topics = new Topics("demo", "phone-7");
  const cases = [
    ["signed_task", Task, topics.tasks, "task"],
    ["signed_hello", Hello, topics.hello, "hello"],
    ["signed_update_chunk", UpdateChunk, topics.update(3, 1), "update_chunk"],
  ] as const;

  it.each(cases)("%s holds for its topic alone, and is made again byte by byte", (name, kind: Kind<any>, topic, bare) => {
    const envelope = unwrap(bytes(name), kind)!;
    expect(written(kind, verified(kind, topic, envelope))).toEqual(bytes(bare));
    expect(() => verified(kind, `${topic}x`, envelope)).toThrow(/does not hold/);
    const secret = Uint8Array.from({ length: 32 }, (_, place) => place);
    const speaker = new MessageSigner(keyPair(secret), new MessageCounter(0n, () => undefined));
    expect(hex(speaker.seal(topic, kind, read(kind, bytes(bare)), 1n << 40n))).toBe(hex(bytes(name)));
    expect(topics.clientId(speaker.keys.sign(utf8("edgefl/v1/client-id")))).toBe("EXpwWIbPnCIdJvXTsMebJKC");
  });

  it("takes numbers that grow, also over a restart with a clock that stands", () => {
    let kept = 0n;
    const first = new MessageCounter(0n, (number) => (kept = number), () => 0);
    const last = first.next(2n) + 1n;
    const second = new MessageCounter(kept, () => undefined, () => 0);
    expect(second.next() > last).toBe(true);
  });
});

describe("tensors", () => {
  it.each(["tensors", "tensors_masked", "patch_old", "patch_new"])("%s is written again byte by byte", (name) => {
    const masks: Record<string, number> = name === "tensors_masked" ? { even: 20, none: 12, sparse: 1000 } : {};
    expect(hex(dump(load(bytes(name)), masks))).toBe(hex(bytes(name)));
  });

  it("a patch leads to the same bits as the server's", () => {
    expect(hex(dump(patched(load(bytes("patch_old")), bytes("patch"))))).toBe(hex(bytes("patch_new")));
  });

  it("a patch of other weights is refused", () => {
    expect(() => patched({}, bytes("patch"))).toThrow(/no tensor/);
  });

  it("a zstd frame unfolds to what its reference promises, and to nothing else", () => {
    const ref = decoded(BlobRef, bytes("blobref_zstd"));
    const frame = bytes("zstd_frame");
    expect(new TextDecoder().decode(unpacked(ref, frame))).toBe("edgefl, ".repeat(125));
    expect(() => unpacked({ ...ref, raw: 999 }, frame)).toThrow(/claims 1000/);
    expect(() => unpacked(ref, frame.subarray(0, frame.length - 4))).toThrow(BundleError);
    expect(() => unpacked(ref, Uint8Array.from([...frame, 0]))).toThrow(/follows/);
  });

  it("a mask may have more entries than a number of 32 bits counts", () => {
    const packed = fromGaps(Uint8Array.of(128, 128, 128, 128, 8), 2 ** 31 + 8);
    expect(packed[2 ** 28]).toBe(1);
  });

  it("bytes of a tensor stand by themselves", () => {
    const [first] = Object.values(load(bytes("tensors")));
    expect(asBytes(first!).byteOffset).toBe(0);
  });
});

describe("manifests", () => {
  const planned = (v: number, format: "onnx" | "executorch") => {
    const manifest = decodeManifest(bytes("manifest_executorch"));
    const graphs = manifest.graphs.map((graph) => ({ ...graph, format, planned_outputs: true }));
    return encoded(Manifest, { ...manifest, v, graphs });
  };

  it("with planned outputs are of version 4, and of programs alone", () => {
    expect(decodeManifest(planned(4, "executorch")).v).toBe(4);
    expect(() => decodeManifest(planned(1, "executorch"))).toThrow(/planned outputs in a manifest of version 1/);
    expect(() => decodeManifest(planned(4, "onnx"))).toThrow(/only a program of format executorch/);
  });

  it("with a split are of version 5, and only these", () => {
    const manifest = decodeManifest(bytes("manifest_held_out"));
    expect([manifest.v, manifest.split]).toEqual([5, { share: 0.3, seed: (1n << 62n) + 1n, part: "held-out" }]);
    const planned = manifest.graphs.map((graph) => ({ ...graph, format: "executorch" as const, planned_outputs: true }));
    expect(decodeManifest(encoded(Manifest, { ...manifest, graphs: planned })).v).toBe(5);
    for (const wrong of [{ v: 4 }, { split: undefined }, { split: { ...manifest.split!, share: 1 } }, { split: { ...manifest.split!, seed: -1n } }]) {
      expect(() => decodeManifest(encoded(Manifest, { ...manifest, ...wrong }))).toThrow(BundleError);
    }
  });

  it.each(["manifest", "manifest_of_exchanges", "manifest_executorch", "manifest_of_texts", "manifest_held_out", "manifest_with_unknown_fields"])(
    "%s is read", (name) => {
      const manifest = decodeManifest(bytes(name));
      const told = values[`${name}.bin`] as { program: string; graphs: { name: string }[] };
      expect(manifest.program).toBe(told.program);
      expect(manifest.graphs.map((graph) => graph.name)).toEqual(told.graphs.map((graph) => graph.name));
    });
});

describe("releases", () => {
  it.each([
    ["1.9.2", "1.15", true], ["1.15", "1.9.2", false], ["1.15", "1.15.0", false], ["1.22.0-dev.2025", "1.23", true], ["unknown", "1.15", false],
  ] as const)("%s beside %s", (version, least, older) => expect(isOlder(version, least)).toBe(older));
  it.each(["", "new", "1.", "1.2.3.4.5", "1.5rc1"])("%s is none", (text) => expect(isRelease(text)).toBe(false));
});
