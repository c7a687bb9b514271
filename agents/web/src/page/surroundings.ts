/** What only a page sees: whether anybody looks at it, the battery, the kind of link. */
import type { DeviceConditions } from "../worker/messages";

interface Battery extends EventTarget {
  level: number;
  charging: boolean;
}
interface Connection extends EventTarget {
  type?: string;
  saveData?: boolean;
}
type Known = Navigator & { getBattery?: () => Promise<Battery>; connection?: Connection };

/** Tells `post` how things are whenever something changes; what it gives says how they are now. */
export async function watch(post: (now: DeviceConditions) => void): Promise<() => DeviceConditions> {
  const known = navigator as Known;
  const battery = await known.getBattery?.().catch(() => undefined); // refused, or no secure context
  const link = known.connection;
  const now = (): DeviceConditions => ({
    hidden: document.visibilityState === "hidden",
    ...(battery ? { battery: battery.level, charging: battery.charging } : {}),
    ...(link && (link.type || link.saveData) ? { metered: link.saveData === true || link.type === "cellular" } : {}),
  });
  const tell = () => post(now());
  document.addEventListener("visibilitychange", tell);
  battery?.addEventListener("levelchange", tell);
  battery?.addEventListener("chargingchange", tell);
  link?.addEventListener("change", tell);
  return now;
}

/** Keeps the screen on while `wanted` says so: a phone whose screen goes dark hides the page, and training pauses. */
export class Awake {
  private lock: WakeLockSentinel | null = null;
  private wanted = false;

  constructor() {
    document.addEventListener("visibilitychange", () => void this.take());
  }

  want(wanted: boolean): void {
    if (wanted === this.wanted) return;
    this.wanted = wanted;
    if (wanted) void this.take();
    else void this.lock?.release().finally(() => (this.lock = null));
  }

  /** A lock ends whenever the page is hidden. */
  private async take(): Promise<void> {
    if (!this.wanted || document.visibilityState !== "visible" || !("wakeLock" in navigator)) return;
    try {
      this.lock = await navigator.wakeLock.request("screen");
    } catch {
      this.lock = null; // little battery, or refused: then the owner keeps the screen on
    }
  }
}
