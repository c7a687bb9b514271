/** What a device says of itself when it connects, when its conditions change, and when a server told it to come later. */
import type { DeviceConditions } from "../worker/messages";
import type { Ack, Conditions, Hello } from "../wire/messages";

const SOONEST_S = 1;
const LATEST_S = 6 * 3600;

export type About = Omit<Hello, "v" | "conditions" | "again">;

export class HelloSender {
  private againAt: number | null = null;
  private told = "";
  private nextLookAt = 0;

  constructor(
    private readonly about: About,
    private readonly say: (hello: Hello) => void,
    private readonly conditions: () => Conditions | undefined,
    private readonly conditionsS: number,
  ) {}

  /** `again`: only the conditions are others than before. */
  hello(again = false): void {
    const conditions = this.conditions();
    this.told = JSON.stringify(conditions);
    this.nextLookAt = performance.now() + 1000 * this.conditionsS;
    this.againAt = null;
    this.say({ v: 1, ...this.about, conditions, again: again || undefined });
  }

  /** The server's word on the hello: it may have no room now, and say when to come again. */
  answered(ack: Ack): void {
    if (ack.reason !== "come-later" || ack.later_s === undefined) return;
    this.againAt = performance.now() + 1000 * Math.max(SOONEST_S, Math.min(ack.later_s, LATEST_S));
  }

  /** To be called now and then. */
  step(connected: boolean): void {
    if (!connected) return;
    const now = performance.now();
    if (this.againAt !== null) {
      if (now >= this.againAt) this.hello();
    } else if (now >= this.nextLookAt && this.told && JSON.stringify(this.conditions()) !== this.told) this.hello(true);
  }
}

/** What the page sees, in the protocol's words; undefined where nothing is known. */
export function conditionsOf(seen: DeviceConditions, available: boolean | null): Conditions | undefined {
  const power = seen.charging === undefined ? "" : seen.charging ? "charging" : "battery";
  const link = seen.metered === undefined ? "" : seen.metered ? "metered" : "unmetered";
  if (!power && !link && available === null) return undefined;
  return { power, link, thermal: "", available };
}

