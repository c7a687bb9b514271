/** Whether the device works now: the person, the page's visibility and the battery decide. */
import type { AgentConfig, DeviceConditions } from "./messages";

const LEAST_BATTERY = 0.2;

export type Reason = "asked" | "hidden" | "battery";

/** Work waits at `open` while there is a reason to. */
export class ConditionsMonitor {
  private seen: DeviceConditions;
  private asked = false;
  private reason_: Reason | null = null;
  private waiting: (() => void)[] = [];

  constructor(
    private readonly config: Pick<AgentConfig, "leastBattery" | "pauseHidden">,
    seen: DeviceConditions,
    private readonly changed: (reason: Reason | null, before: Reason | null) => void,
  ) {
    this.seen = seen;
    this.look();
  }

  get surroundings(): DeviceConditions {
    return this.seen;
  }

  /** Why the device stands still; null while it works. */
  get reason(): Reason | null {
    return this.reason_;
  }

  see(seen: DeviceConditions): void {
    this.seen = { ...this.seen, ...seen };
    this.look();
  }

  ask(paused: boolean): void {
    this.asked = paused;
    this.look();
  }

  /** Ends once there is no reason to wait, or the agent ends (`free`). */
  open(): Promise<void> {
    if (this.reason_ === null) return Promise.resolve();
    return new Promise((resolve) => this.waiting.push(resolve));
  }

  /** Let go of whoever waits, such as for the agent's end. */
  free(): void {
    for (const resolve of this.waiting.splice(0)) resolve();
  }

  private look(): void {
    const before = this.reason_;
    this.reason_ = this.found();
    if (this.reason_ === null) this.free();
    if (this.reason_ !== before) this.changed(this.reason_, before);
  }

  private found(): Reason | null {
    const { hidden, battery, charging } = this.seen;
    if (this.asked) return "asked";
    if (hidden && (this.config.pauseHidden ?? true)) return "hidden";
    if (battery !== undefined && charging === false && battery < (this.config.leastBattery ?? LEAST_BATTERY)) return "battery";
    return null;
  }
}
