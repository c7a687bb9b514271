/** What waits to be read, and whoever waits for it. */
export class Mailbox<T> {
  private readonly waiting: T[] = [];
  private reader: ((value: T | undefined) => void) | null = null;

  constructor(private readonly most = Infinity) {}

  get size(): number {
    return this.waiting.length;
  }

  /** False if there is no room. */
  put(value: T): boolean {
    if (this.reader) {
      const read = this.reader;
      this.reader = null;
      read(value);
      return true;
    }
    if (this.waiting.length >= this.most) return false;
    this.waiting.push(value);
    return true;
  }

  /** The next one; undefined after so long without any. One reader at a time. */
  get(timeoutMs: number): Promise<T | undefined> {
    if (this.waiting.length) return Promise.resolve(this.waiting.shift());
    return new Promise((resolve) => {
      const timer = setTimeout(() => {
        this.reader = null;
        resolve(undefined);
      }, timeoutMs);
      this.reader = (value) => {
        clearTimeout(timer);
        resolve(value);
      };
    });
  }

  /** What waits, taken out. */
  drain(): T[] {
    return this.waiting.splice(0);
  }
}

export const pause = (ms: number): Promise<void> => new Promise((resolve) => setTimeout(resolve, ms));
