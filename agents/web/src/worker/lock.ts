/** One tab at a time has a device. Web Locks need a secure context; where there is none, tabs ask each other. */
const ASK_MS = 300;

/** What lets the device go; null if another tab has it. */
export async function holdDevice(name: string): Promise<(() => void) | null> {
  return globalThis.navigator?.locks ? holdLock(name) : holdChannel(name);
}

function holdLock(name: string): Promise<(() => void) | null> {
  return new Promise((resolve) => {
    void navigator.locks.request(name, { ifAvailable: true }, (lock) => {
      if (lock === null) {
        resolve(null);
        return undefined;
      }
      return new Promise<void>((release) => resolve(release));
    });
  });
}

/** Whoever has the device answers; of two that ask at once the one with the smaller mark has it. */
async function holdChannel(name: string): Promise<(() => void) | null> {
  const channel = new BroadcastChannel(name);
  const mark = Math.random();
  let [taken, held] = [false, false];
  channel.onmessage = (event: MessageEvent<{ ask?: number; have?: boolean }>) => {
    const { ask, have } = event.data;
    if (have) taken = true;
    if (ask !== undefined && (held || mark < ask)) channel.postMessage({ have: true });
  };
  channel.postMessage({ ask: mark });
  await new Promise((resolve) => setTimeout(resolve, ASK_MS));
  if (taken) {
    channel.close();
    return null;
  }
  held = true;
  return () => channel.close();
}
