/** What is told now and then: whoever can write to a device may write the same a million times. */
const MOST = 256;

export class NoticeLimiter {
  private readonly againAt = new Map<string, number>();

  constructor(private readonly everyS: number) {}

  /** Whether `what` is told now. */
  due(what: string): boolean {
    const now = performance.now();
    if (now < (this.againAt.get(what) ?? now)) return false;
    this.againAt.delete(what);
    this.againAt.set(what, now + 1000 * this.everyS);
    if (this.againAt.size > MOST) this.againAt.delete(this.againAt.keys().next().value!);
    return true;
  }
}
