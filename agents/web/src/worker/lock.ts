/**
 * One tab at a time has a device; the next one waits for it. By Web Locks, which need a secure context; where there are none,
 * by a database that only one tab can bring to its next version.
 */
import { noStore } from "../store/store";

const PATIENCE_MS = 1000;
const TAKEN = "VersionError";

/** What lets the device go, once it is this tab's; `waits` is called where another has it first. */
export function holdDevice(name: string, waits: () => void): Promise<() => void> {
  return globalThis.navigator?.locks ? holdLock(name, waits) : holdDatabase(name, waits);
}

async function holdLock(name: string, waits: () => void): Promise<() => void> {
  const asked = (options: LockOptions) =>
    new Promise<(() => void) | null>((resolve, reject) => {
      const granted = (lock: Lock | null) => (lock === null ? resolve(null) : new Promise<void>((release) => resolve(release)));
      navigator.locks.request(name, options, granted).catch(reject);
    });
  const free = await asked({ ifAvailable: true });
  if (free !== null) return free;
  waits();
  return (await asked({}))!;
}

/**
 * A browser upgrades a database only once nobody else has it open, and a tab that ends, however it does, has nothing open. No
 * tab has to answer another, so one in the middle of a long step loses nothing.
 */
async function holdDatabase(name: string, waits: () => void): Promise<() => void> {
  const database = `${name}:lock`; // the store has the name itself
  const patience = setTimeout(waits, PATIENCE_MS);
  try {
    for (;;) {
      const known = await opened(database);
      const { version } = known.db;
      known.db.close();
      try {
        const held = await opened(database, version + 1);
        if (held.upgraded) return () => held.db.close();
        held.db.close(); // another tab was faster, and shares this version
      } catch (error) {
        if ((error as DOMException).name !== TAKEN) throw error;
      }
    }
  } catch (error) {
    throw noStore(error);
  } finally {
    clearTimeout(patience);
  }
}

function opened(name: string, version?: number): Promise<{ db: IDBDatabase; upgraded: boolean }> {
  return new Promise((resolve, reject) => {
    const request = indexedDB.open(name, version);
    let upgraded = false;
    request.onupgradeneeded = () => (upgraded = true);
    request.onsuccess = () => resolve({ db: request.result, upgraded });
    request.onerror = () => reject(request.error);
  });
}
