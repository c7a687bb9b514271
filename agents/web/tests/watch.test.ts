/** What a hostile broker sends ends the connection before it is held. */
import { createServer, type Socket } from "node:net";
import { describe, expect, it } from "vitest";
import { mostBytes, PacketWatch } from "../src/link/watch";
import { type Event, Session } from "../src/link/session";
import { DEFAULT_LIMITS } from "../src/wire/limits";

const bytes = (...values: number[]) => Uint8Array.from(values);
const most = mostBytes(DEFAULT_LIMITS);

describe("the watch over packets", () => {
  it.each([
    ["QoS 2", [bytes(0x34)], "QoS 2"],
    ["a size that comes in pieces", [bytes(0x30), bytes(0xff, 0xff), bytes(0xff, 0x7f)], "268435455 bytes"],
    ["a large SUBACK behind a small message", [bytes(0x30, 2, 9, 9, 0x90, 0x80), bytes(0x80, 0x40)], "1048576 bytes"],
  ])("objects to %s", (_, chunks, text) => {
    const watch = new PacketWatch(most);
    expect(chunks.map((chunk) => watch.objection(chunk)).join("")).toContain(text);
  });

  it("objects to nothing that is legal, however it is cut", () => {
    const message = new Uint8Array(5 + 300);
    message.set([0x32, 0xac, 0x02]);
    for (let cut = 1; cut < 40; cut++) {
      const watch = new PacketWatch(most);
      const whole = Uint8Array.from([0x20, 2, 0, 0, ...message.subarray(0, 303), 0xd0, 0, ...message.subarray(0, 303)]);
      for (let at = 0; at < whole.length; at += cut) expect(watch.objection(whole.subarray(at, at + cut))).toBe("");
    }
  });

  it("ends a connection", async () => {
    const server = createServer((socket: Socket) => {
      socket.on("error", () => undefined);
      socket.once("data", () => socket.write(bytes(0x20, 3, 0, 0, 0, 0x30, 0xff, 0xff, 0xff, 0x7f)));
    });
    await new Promise<void>((resolve) => server.listen(0, "127.0.0.1", resolve));
    const url = `mqtt://127.0.0.1:${(server.address() as { port: number }).port}`;
    const will = { topic: "a", payload: bytes(1) };
    const down = await new Promise<Event>((resolve) => {
      const session = new Session({ url }, "id", DEFAULT_LIMITS, () => will, (event) => {
        if (event.kind !== "down") return;
        void session.stop();
        resolve(event);
      });
      void session.run();
    });
    server.close();
    expect((down as { reason: string }).reason).toContain("268435455 bytes");
  });
});
