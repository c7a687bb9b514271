/** What the page makes of what its agent says. */
import { describe, expect, it } from "vitest";
import { bytes, milliseconds } from "../src/page/format";
import { renamed } from "../src/page/identity";
import { counted, unknown } from "../src/page/photos";
import { after, START, type PageState } from "../src/page/state";
import type { AgentEvent, EventName, ProgressEvent } from "../src/worker/messages";

const event = (name: EventName, text = "", details: AgentEvent["details"] = {}): AgentEvent => ({ type: "event", event: name, text, details });
const progress = (round: number, step: number, more: Partial<ProgressEvent> = {}): ProgressEvent => ({
  type: "progress", round, tier: "weak", stage: "train", step, steps: 10, loss: 1, stepMs: 2, peakBytes: 3, downBytes: 100,
  upBytes: 50 * round, ...more,
});
const told = (...messages: Parameters<typeof after>[1][]): PageState =>
  messages.reduce((state, message) => after(state, message, 0), START);

describe("the page's state", () => {
  it("follows a round to its acceptance", () => {
    const training = told(event("online"), event("round", "", { round: 1 }), progress(1, 4));
    expect([training.phase, training.doing, training.tier]).toEqual(["training", "Round 1: step 4 of 10", "weak"]);
    const waiting = after(training, event("accepted"), 0);
    expect([waiting.phase, waiting.accepted, waiting.link]).toEqual(["waiting", 1, "up"]);
  });

  it("adds up what rounds fetched, and takes what was sent as it is told", () => {
    const state = told(progress(1, 5), progress(1, 10), progress(2, 5, { downBytes: 7 }));
    expect([state.downBefore, state.progress?.downBytes, state.sent]).toEqual([100, 7, 50]);
  });

  it("is not woken by a late report while it is paused", () => {
    const paused = told(event("round", "", { round: 1 }), progress(1, 1), event("paused", "this page is hidden"), progress(1, 2));
    expect([paused.phase, paused.doing]).toEqual(["paused", "Paused: this page is hidden"]);
    expect(after(paused, event("resumed"), 0).phase).toBe("training");
  });

  it("keeps a thank you when the agent ends, and shows an error when it has one", () => {
    expect(told(event("done"), { type: "ended", error: "", code: 0 }).phase).toBe("done");
    const late = told(event("done"), event("accepted"));
    expect([late.phase, late.accepted]).toEqual(["done", 1]);
    const failed = told({ type: "ended", error: "no memory", code: 6 });
    expect([failed.phase, failed.error, failed.lines[0]?.text]).toEqual(["ended", "no memory", "no memory"]);
  });

  it("keeps no more lines and points than a phone shows", () => {
    const state = told(...Array.from({ length: 1000 }, (_, at) => progress(1, at)), ...Array.from({ length: 99 }, () => event("round")));
    expect([state.losses.length, state.lines.length]).toEqual([400, 60]);
  });
});

describe("names, numbers and photos", () => {
  it("a device keeps its digits in another tier", () => {
    const tiers = [{ name: "strong", prefix: "strong-web-", memory_bytes: 0 }, { name: "weak", prefix: "weak-web-", memory_bytes: 0 }];
    expect(renamed("weak-web-3f9a2c", tiers, tiers[0])).toBe("strong-web-3f9a2c");
    expect(renamed("mine", tiers, tiers[1])).toBe("weak-web-mine");
  });

  it("numbers have units", () => {
    expect([bytes(999), bytes(1500), bytes(123456789), milliseconds(3.24), milliseconds(1500)]).toEqual(
      ["999 B", "1.5 kB", "123 MB", "3.2 ms", "1.5 s"]);
  });

  it("photos are counted by class, and strange classes are named", () => {
    const photos = ["cat", "dog", "cat"].map((label) => ({ name: label, label, file: new Blob() }));
    expect(counted(photos)).toBe("cat 2, dog 1");
    expect([unknown(photos, ["cat"]), unknown(photos, [])]).toEqual([["dog"], []]);
  });
});
