/** What the launcher's own server answers: it listens to this machine, where anybody may ask it anything. */
import { mkdirSync, mkdtempSync, writeFileSync } from "node:fs";
import { connect } from "node:net";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { gunzipSync, gzipSync } from "node:zlib";
import { beforeAll, describe, expect, it } from "vitest";

let port = 0;
let page = "";

beforeAll(async () => {
  const folder = join(mkdtempSync(join(tmpdir(), "edgefl-dist-")), "dist");
  mkdirSync(join(folder, "ort"), { recursive: true });
  writeFileSync(join(folder, "worker.js"), "// worker");
  writeFileSync(join(folder, "ort", "code.wasm.gz"), gzipSync("code"));
  process.env["EDGEFL_WEB_DIST"] = folder;
  const { serve } = (await import(String(new URL("../bin/device/serve.mjs", import.meta.url)))) as {
    serve: (options: object) => Promise<{ port: number; path: string }>;
  };
  ({ port, path: page } = await serve({ data: join(folder, "worker.js"), broker: { url: "ws://127.0.0.1:9" } }));
});

/** The answer to a request line as it is, without what a client makes of it. */
function answered(target: string): Promise<Buffer> {
  return new Promise((resolve, reject) => {
    const pieces: Buffer[] = [];
    const socket = connect(port, "127.0.0.1", () => socket.write(`GET ${target} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n`));
    socket.on("data", (piece) => pieces.push(piece));
    socket.on("end", () => resolve(Buffer.concat(pieces)));
    socket.on("error", reject);
  });
}

describe("the launcher's server", () => {
  it.each(["//", "/../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "/page", "/data.npz?secret=no", "/ort"])("has nothing at %s", async (target) => {
    expect(String(await answered(target))).toMatch(/^HTTP\/1\.1 404/);
  });

  it("has the page for its browser", async () => {
    expect(String(await answered(new URL(page).pathname + new URL(page).search))).toMatch(/^HTTP\/1\.1 200[^]*new Worker/);
  });

  it("gives what is kept packed as it is", async () => {
    const answer = await answered("/ort/code.wasm");
    const [head, body] = [String(answer).split("\r\n\r\n", 1)[0]!, answer.subarray(answer.indexOf("\r\n\r\n") + 4)];
    expect(head).toMatch(/200 OK[^]*Content-Encoding: gzip[^]*application\/wasm/);
    expect(String(gunzipSync(body.subarray(body.indexOf("\r\n") + 2, body.lastIndexOf("\r\n0\r\n"))))).toBe("code");
  });
});
