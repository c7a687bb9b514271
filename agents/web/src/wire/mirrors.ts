/** Mirrors: where blobs lie beside the broker, each at `BASE/<sha256>`. */
import { ConfigError } from "./errors";

/** That an announcement names and a device asks. */
export const MOST_MIRRORS = 8;
const MOST_LETTERS = 500;

/** Whether a host, as URLs have it, is this machine or an address of a private network; names say nothing of that. */
export function isNear(host: string): boolean {
  if (host.startsWith("[")) return host === "[::1]" || /^\[f[cd]/i.test(host);
  if (host === "localhost" || host.endsWith(".localhost")) return true;
  return /^(127|10)\.|^192\.168\.|^172\.(1[6-9]|2\d|3[01])\./.test(host) && /^[\d.]+$/.test(host);
}

/** The mirror's address without a slash at its end; ConfigError for anything that is not asked. */
export function parseMirror(text: string): string {
  const wrong = new ConfigError(`'${text.slice(0, MOST_LETTERS)}' is no mirror: write it like https://weights.example.org/demo`);
  let url: URL;
  try {
    url = new URL(text);
  } catch {
    throw wrong;
  }
  const odd = url.username || url.password || url.search || url.hash || text.includes("?") || text.includes("#");
  const known = url.protocol === "https:" || (url.protocol === "http:" && isNear(url.hostname));
  if (odd || !known || text.length > MOST_LETTERS) throw wrong;
  return `${url.origin}${url.pathname.replace(/\/+$/, "")}`;
}
