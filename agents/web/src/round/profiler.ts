/** What a round costs on this device. */
export class RoundProfiler {
  private readonly times = new Map<string, number[]>();
  readonly idleBytes: number;
  peakBytes: number;

  constructor(private readonly bytes: () => number) {
    this.idleBytes = this.peakBytes = bytes();
  }

  async timed<T>(name: string, work: () => Promise<T>): Promise<T> {
    const start = performance.now();
    try {
      return await work();
    } finally {
      const times = this.times.get(name) ?? [];
      times.push(performance.now() - start);
      this.times.set(name, times);
      this.peakBytes = Math.max(this.peakBytes, this.bytes());
    }
  }

  median(name: string): number {
    const sorted = [...(this.times.get(name) ?? [0])].sort((one, other) => one - other);
    const middle = sorted.length >> 1;
    return sorted.length % 2 ? sorted[middle]! : (sorted[middle - 1]! + sorted[middle]!) / 2;
  }

  total(name: string): number {
    return (this.times.get(name) ?? []).reduce((sum, each) => sum + each, 0);
  }

  last(name: string): number {
    return this.times.get(name)?.at(-1) ?? 0;
  }
}
