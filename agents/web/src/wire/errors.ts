/** What can go wrong, by what is to be done about it. Messages say what was expected, what was found and the remedy. */

export class EdgeflError extends Error {
  /** Of `edgefl device`, for the same error. */
  get code(): number {
    return 1;
  }

  constructor(message: string, readonly details: Record<string, string | number> = {}) {
    super(message);
    this.name = new.target.name;
  }
}

/** A message, or bytes, that are not what the protocol says. */
export class ProtocolError extends EdgeflError {
  override get code(): number { return 8; }
}

/** A message that is not from whom it should be; `reason` is a code of the protocol. */
export class IdentityError extends ProtocolError {
  constructor(readonly reason: string, message: string) {
    super(message);
  }
}

/** A copy of the server's last message on a topic, which brokers may deliver twice. Ignore it without a report. */
export class DuplicateMessageError extends IdentityError {
  constructor(kind: string, topic: string) {
    super("repeated", `a ${kind} on ${topic} came once more`);
  }
}

/** A bundle, a blob or weights that cannot be used. */
export class BundleError extends EdgeflError {
  override get code(): number { return 6; }
}

/** The device's own data do not fit. */
export class DataError extends EdgeflError {
  override get code(): number { return 3; }
}

/** The store does not take, or give, what it should. */
export class StoreError extends EdgeflError {
  override get code(): number { return 11; }
}

/** What the person asked for cannot be. */
export class ConfigError extends EdgeflError {
  override get code(): number { return 2; }
}

/** The round is over, or the agent stops. */
export class RoundAborted extends EdgeflError {
  override get code(): number { return 12; }
}

/** This device does not take part, for a reason of the protocol's table. */
export class RoundDeclined extends EdgeflError {
  constructor(readonly reason: string, message: string, details: Record<string, string | number> = {}) {
    super(message, details);
  }
}

/** Start of the message, and code, of a BundleError for blobs that neither the broker nor a mirror has. */
export const LOST_CHUNK = "no good chunk";

/** Code of a failed attempt. The message of the error stays on the device: it may hold values of the data. */
export function failureCode(error: unknown): string {
  if (error instanceof EdgeflError && error.message.startsWith(LOST_CHUNK)) return LOST_CHUNK;
  if (error instanceof DataError) return "data";
  if (error instanceof StoreError) return "store";
  return error instanceof ProtocolError || error instanceof BundleError ? "bundle" : "engine";
}

/** What any error says. */
export function said(error: unknown): string {
  if (error instanceof EdgeflError) return error.message;
  return error instanceof Error ? `${error.name}: ${error.message}` : String(error);
}
