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

it("a blob may have more chunks than a function takes arguments", async () => {
  const blobs = new BlobStore(await Store.open("demo", "fetching", 10), 2 ** 30);
  const away = { connected: false, subscribe: () => undefined, unsubscribe: () => undefined };
  const mirrors = new Mirrors(DEFAULT_LIMITS, () => undefined);
  const fetcher = new Fetcher(away, new Topics("demo", "phone-7"), blobs, DEFAULT_LIMITS, () => true, mirrors);
  const chunks = 200_000;
  const ref = { sha256: "0".repeat(64), size: chunks, chunk: 1, digests: new Uint8Array(32 * chunks), codec: "" as const, raw: 0 };
  await expect(fetcher.get(ref)).rejects.toThrow(RoundAborted);
});
