/** What a device asks the broker for. */
import "fake-indexeddb/auto";
import { expect, it } from "vitest";
import { Fetcher } from "../src/link/fetch";
import { Mirrors } from "../src/link/mirrors";
import { BlobStore } from "../src/store/blobs";
import { Store } from "../src/store/store";
import { RoundAborted } from "../src/wire/errors";
import { DEFAULT_LIMITS } from "../src/wire/limits";
import { Topics } from "../src/wire/topics";

async function fetcher(name: string): Promise<Fetcher> {
  const blobs = new BlobStore(await Store.open("demo", name, 10), 2 ** 30);
  const away = { connected: false, subscribe: () => undefined, unsubscribe: () => undefined };
  const mirrors = new Mirrors(DEFAULT_LIMITS, () => undefined);
  return new Fetcher(away, new Topics("demo", "phone-7"), blobs, DEFAULT_LIMITS, () => true, mirrors);
}

function blob(size: number, chunk: number) {
  const digests = new Uint8Array(size > chunk ? 32 * Math.ceil(size / chunk) : 0);
  return { sha256: "0".repeat(64), size, chunk, digests, codec: "" as const, raw: 0 };
}

it("a blob may have more chunks than a function takes arguments", async () => {
  await expect((await fetcher("fetching")).get(blob(200_000, 1))).rejects.toThrow(RoundAborted);
});

it("chunks that are larger than the messages it reads are declined", async () => {
  const most = DEFAULT_LIMITS.max_message_bytes;
  const declined = { reason: "large-chunks", message: expect.stringContaining(`at most (limits.max_message_bytes), found ${most + 1}`) };
  await expect((await fetcher("large")).get(blob(most + 1, 2 * most))).rejects.toMatchObject(declined);
  await expect((await fetcher("large")).get(blob(most, 2 * most))).rejects.toThrow(RoundAborted);
});
