/** Blobs by real HTTP servers: right ones, lying ones, and such as have nothing. */
import "fake-indexeddb/auto";
import { createServer, type RequestListener, type Server } from "node:http";
import type { AddressInfo } from "node:net";
import { afterEach, describe, expect, it } from "vitest";
import { Mirrors } from "../src/link/mirrors";
import { BlobStore } from "../src/store/blobs";
import { Store } from "../src/store/store";
import { describe as described } from "../src/wire/blobs";
import { DEFAULT_LIMITS } from "../src/wire/limits";
import type { Round } from "../src/wire/messages";
import { isNear, parseMirror } from "../src/wire/mirrors";

const DATA = Uint8Array.from({ length: 1000 }, (_, place) => place % 251);
const servers: Server[] = [];
afterEach(() => servers.splice(0).forEach((server) => server.close()));

async function served(answer: RequestListener): Promise<string> {
  const server = createServer(answer).listen(0, "127.0.0.1");
  servers.push(server);
  await new Promise((resolve) => server.once("listening", resolve));
  return `http://127.0.0.1:${(server.address() as AddressInfo).port}`;
}

const right: RequestListener = (request, response) => {
  const [, first, last] = /bytes=(\d+)-(\d+)/.exec(request.headers.range ?? "")!;
  response.writeHead(206).end(DATA.subarray(Number(first), Number(last) + 1));
};

let count = 0;
async function brought(mirrors: string[], only = false) {
  const told: string[] = [];
  const ref = await described(DATA, 64);
  const store = new BlobStore(await Store.open("demo", `mirror-${count++}`, 10), 1e6);
  const asked = new Mirrors({ ...DEFAULT_LIMITS, fetch_timeout_s: 2 }, (text) => void told.push(text));
  asked.announced({ mirrors, mirrors_only: only } as Round);
  await asked.bring([ref], store, () => false);
  return { told, asked, missing: await store.missing(ref), data: await store.get(ref) };
}

describe("a mirror", () => {
  it("gives the stretch that is missing", async () => {
    const found = await brought([await served(right)]);
    expect([found.missing, found.told]).toEqual([[], []]);
    expect(found.data).toEqual(DATA);
    expect(found.asked.takeReceived()).toBe(1000);
  });

  it("may send the whole for a stretch", async () => {
    const url = await served((_, response) => response.writeHead(200).end(DATA));
    expect((await brought([url])).missing).toEqual([]);
  });

  it("that lies is left for the next at the first wrong digest, and what was right stays", async () => {
    const wrong = DATA.slice();
    wrong[200] = 255;
    const lying = await served((_, response) => response.writeHead(200).end(wrong));
    const alone = await brought([lying]);
    expect(alone.missing[0]).toBe(3);
    expect(alone.told[0]).toMatch(/chunk 3 has a wrong digest/);
    expect((await brought([lying, await served(right)])).missing).toEqual([]);
  });

  it("that has not the blob, sends us elsewhere or ends too early gives nothing, and the broker is asked", async () => {
    for (const answer of [
      ((_, response) => response.writeHead(404).end()) as RequestListener,
      ((_, response) => response.writeHead(302, { Location: "http://127.0.0.1:9/" }).end()) as RequestListener,
      ((_, response) => response.writeHead(200).end(DATA.subarray(0, 10))) as RequestListener,
    ]) {
      const found = await brought([await served(answer)]);
      expect(found.missing).toHaveLength(16);
      expect(() => found.asked.checkBroker()).not.toThrow();
    }
  });

  it("is all there is where the announcement says so", async () => {
    const found = await brought([await served((_, response) => response.writeHead(500).end())], true);
    expect(() => found.asked.checkBroker()).toThrow(/no good chunk: no mirror gave all blobs.*answers 500/);
  });
});

describe("a mirror's address", () => {
  it.each(["https://weights.example.org/demo/", "http://192.168.1.7:8480", "http://localhost:1"])("%s is asked", (text) => {
    expect(parseMirror(text)).toBe(text.replace(/\/$/, ""));
  });

  it.each([
    "http://weights.example.org", "https://user@example.org", "https://example.org/?a", "https://example.org/#a", "ftp://10.0.0.1",
    `https://example.org/${"a".repeat(500)}`, "no",
  ])("%s is not", (text) => {
    expect(() => parseMirror(text)).toThrow(/is no mirror/);
  });

  it("is near by its number alone", () => {
    for (const host of ["10.1.2.3", "172.16.0.1", "[::1]", "[fd00::7]"]) expect([host, isNear(host)]).toEqual([host, true]);
    for (const host of ["8.8.8.8", "172.32.0.1", "10.example.org", "fdic.example.org", "[2001:db8::1]"]) {
      expect([host, isNear(host)]).toEqual([host, false]);
    }
  });
});
