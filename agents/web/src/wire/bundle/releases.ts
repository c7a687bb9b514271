/** Releases of runtimes, as manifests name them and agents compare them: `1.9.2` is older than `1.15`. */
const RELEASE = /^[0-9]{1,9}(\.[0-9]{1,9}){0,3}/;

/** Return true for up to four numbers with dots between them. */
export const isRelease = (text: string): boolean => RELEASE.exec(text)?.[0] === text;

/** Return true if `version` comes before the release `least`. What follows the numbers, such as `-dev`, does not count. */
export function isOlder(version: string, least: string): boolean {
  const found = RELEASE.exec(version)?.[0].split(".").map(Number);
  if (!found) return false;
  const wanted = least.split(".").map(Number);
  const place = [0, 1, 2, 3].find((at) => (found[at] ?? 0) !== (wanted[at] ?? 0));
  return place !== undefined && (found[place] ?? 0) < (wanted[place] ?? 0);
}
