/** Typed maps over MessagePack: what is read has the fields of its type, and what is written has them in their order. */
import { ProtocolError } from "./errors";
import { decode, Float, type Value, Writer } from "./msgpack";

/** Reads and writes one type; `path` says where in a message a value stands. */
export interface Codec<T> {
  read(value: Value, path: string): T;
  write(out: Writer, value: T): void;
}

export type Read<C> = C extends Codec<infer T> ? T : never;

function wrong(path: string, expected: string, found: Value): ProtocolError {
  return new ProtocolError(`expected ${expected}, found ${kindOf(found)} at ${path}`);
}

function kindOf(value: Value): string {
  if (value === null) return "nil";
  if (value instanceof Float) return "float";
  if (value instanceof Uint8Array) return "bytes";
  if (Array.isArray(value)) return "array";
  if (value instanceof Map) return "map";
  if (typeof value === "string") return "str";
  return typeof value === "boolean" ? "bool" : "int";
}

const LARGEST = (1n << 63n) - 1n;

/** Whole numbers that JavaScript's numbers hold: sizes, counts, rounds. */
export const int: Codec<number> = {
  read(value, path) {
    if (typeof value !== "number") throw wrong(path, "int within 2^53", value);
    return value;
  },
  write: (out, value) => out.int(value),
};

/** Whole numbers of 64 bits with sign: seeds, numbers of messages, keys' expiries. */
export const int64: Codec<bigint> = {
  read(value, path) {
    if ((typeof value !== "number" && typeof value !== "bigint") || BigInt(value) > LARGEST) {
      throw wrong(path, "int of 64 bits", value);
    }
    return BigInt(value);
  },
  write: (out, value) => out.int(value),
};

export const float: Codec<number> = {
  read(value, path) {
    if (value instanceof Float) return value.value;
    if (typeof value === "number" || typeof value === "bigint") return Number(value);
    throw wrong(path, "float", value);
  },
  write: (out, value) => out.float(value),
};

export const str: Codec<string> = {
  read(value, path) {
    if (typeof value !== "string") throw wrong(path, "str", value);
    return value;
  },
  write: (out, value) => out.text(value),
};

export const bool: Codec<boolean> = {
  read(value, path) {
    if (typeof value !== "boolean") throw wrong(path, "bool", value);
    return value;
  },
  write: (out, value) => out.bool(value),
};

export const bytes: Codec<Uint8Array> = {
  read(value, path) {
    if (!(value instanceof Uint8Array)) throw wrong(path, "bytes", value);
    return value;
  },
  write: (out, value) => out.bytes(value),
};

/** Bytes of one length, such as a key. */
export function bytesOf(length: number): Codec<Uint8Array> {
  return {
    read(value, path) {
      const found = bytes.read(value, path);
      if (found.length !== length) throw new ProtocolError(`expected ${length} bytes, found ${found.length} at ${path}`);
      return found;
    },
    write: bytes.write,
  };
}

export function oneOf<const T extends string>(...allowed: T[]): Codec<T> {
  return {
    read(value, path) {
      if (!allowed.includes(value as T)) throw wrong(path, `one of ${allowed.join(", ")}`, value);
      return value as T;
    },
    write: (out, value) => out.text(value),
  };
}

export function list<T>(item: Codec<T>): Codec<T[]> {
  return {
    read(value, path) {
      if (!Array.isArray(value)) throw wrong(path, "array", value);
      return value.map((each, index) => item.read(each, `${path}[${index}]`));
    },
    write(out, value) {
      out.array(value.length);
      for (const each of value) item.write(out, each);
    },
  };
}

/** A map from texts, as an object without a prototype. */
export function dict<T>(item: Codec<T>): Codec<Record<string, T>> {
  return {
    read(value, path) {
      if (!(value instanceof Map)) throw wrong(path, "map", value);
      const found = Object.create(null) as Record<string, T>;
      for (const [key, each] of value) {
        if (typeof key !== "string") throw wrong(path, "str as key", key);
        found[key] = item.read(each, `${path}.${key}`);
      }
      return found;
    },
    write(out, value) {
      const entries = Object.entries(value);
      out.map(entries.length);
      for (const [key, each] of entries) {
        out.text(key);
        item.write(out, each);
      }
    },
  };
}

/** A map from whole numbers. */
export function numbered<T>(item: Codec<T>): Codec<Map<number, T>> {
  return {
    read(value, path) {
      if (!(value instanceof Map)) throw wrong(path, "map", value);
      return new Map([...value].map(([key, each]) => [int.read(key as Value, path), item.read(each, `${path}.${key}`)]));
    },
    write(out, value) {
      out.map(value.size);
      for (const [key, each] of value) {
        out.int(key);
        item.write(out, each);
      }
    },
  };
}

export function nullable<T>(item: Codec<T>): Codec<T | null> {
  return {
    read: (value, path) => (value === null ? null : item.read(value, path)),
    write(out, value) {
      if (value === null) out.nil();
      else item.write(out, value);
    },
  };
}

/** A field; with `missing` it may be left out, and is by a writer that says so (`omits`). */
export interface Field<T> {
  codec: Codec<T>;
  missing?: () => T;
  omits?: (value: T) => boolean;
}

export const required = <T>(codec: Codec<T>): Field<T> => ({ codec });

/** May be missing, and is always written. */
export const either = <T>(codec: Codec<T>, missing: () => T): Field<T> => ({ codec, missing });

/** May be missing, and is left out where it has its default. */
export function omitted<T>(codec: Codec<T>, missing: () => T): Field<T> {
  return { codec, missing, omits: (value) => isEmpty(value, missing()) };
}

/** May be missing, which is `undefined`. */
export function unset<T>(codec: Codec<T>): Field<T | undefined> {
  return {
    codec: { read: codec.read, write: (out, value) => codec.write(out, value as T) },
    missing: () => undefined,
    omits: (value) => value === undefined,
  };
}

function isEmpty(value: unknown, missing: unknown): boolean {
  if (value === missing) return true;
  if (value instanceof Uint8Array) return value.length === 0;
  if (Array.isArray(value)) return value.length === 0;
  if (value instanceof Map) return value.size === 0;
  return typeof value === "object" && value !== null && typeof missing === "object" && Object.keys(value).length === 0;
}

type Fields = Record<string, Field<any>>;
type Struct<F extends Fields> = { [K in keyof F]: F[K] extends Field<infer T> ? T : never };

/** A map with these fields; unknown keys are passed over. */
export function struct<F extends Fields>(name: string, fields: F): Codec<Struct<F>> {
  const listed = Object.entries(fields);
  return {
    read(value, path) {
      if (!(value instanceof Map)) throw wrong(path || name, "map", value);
      const found: Record<string, unknown> = {};
      for (const [key, field] of listed) {
        const at = path ? `${path}.${key}` : `${name}.${key}`;
        if (value.has(key)) found[key] = field.codec.read(value.get(key)!, at);
        else if (field.missing) found[key] = field.missing();
        else throw new ProtocolError(`${name} lacks the field ${key}`);
      }
      return found as Struct<F>;
    },
    write(out, value) {
      const written = listed.filter(([key, field]) => !field.omits?.(value[key]));
      out.map(written.length);
      for (const [key, field] of written) {
        out.text(key);
        field.codec.write(out, value[key]);
      }
    },
  };
}

export function encoded<T>(codec: Codec<T>, value: T): Uint8Array {
  const out = new Writer();
  codec.write(out, value);
  return out.finish();
}

/** The value in `data`; ProtocolError says what in it is not as `codec` has it. */
export function decoded<T>(codec: Codec<T>, data: Uint8Array, path = ""): T {
  return codec.read(decode(data), path);
}
