/**
 * MessagePack that tells whole numbers from others, in both directions: the protocol refuses an int written as 3.0, and a
 * float that is whole has to stay one. Libraries for JavaScript make the same number of both.
 */
import { ProtocolError } from "./errors";

/** A float 32 or 64 as it was read. */
export class Float {
  constructor(readonly value: number) {}
}

/** What is read: whole numbers beyond 2^53 are bigint; maps keep their order. */
export type Value = null | boolean | number | bigint | Float | string | Uint8Array | Value[] | ValueMap;
export type ValueMap = Map<string | number | bigint, Value>;

const MOST_DEPTH = 64;
const utf8 = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });
const encoder = new TextEncoder();

class Reader {
  private at = 0;
  private readonly view: DataView;

  constructor(private readonly data: Uint8Array) {
    this.view = new DataView(data.buffer, data.byteOffset, data.byteLength);
  }

  get isAtEnd(): boolean {
    return this.at === this.data.length;
  }

  value(depth: number): Value {
    if (depth > MOST_DEPTH) throw new ProtocolError("MessagePack is nested too deeply");
    const head = this.take(1)[0]!;
    if (head < 0x80) return head;
    if (head < 0x90) return this.map(head & 15, depth);
    if (head < 0xa0) return this.array(head & 15, depth);
    if (head < 0xc0) return this.text(head & 31);
    if (head >= 0xe0) return head - 256;
    switch (head) {
      case 0xc0: return null;
      case 0xc2: return false;
      case 0xc3: return true;
      case 0xc4: return this.bytes(this.unsigned(1));
      case 0xc5: return this.bytes(this.unsigned(2));
      case 0xc6: return this.bytes(this.unsigned(4));
      case 0xca: return new Float(this.view.getFloat32(this.skip(4)));
      case 0xcb: return new Float(this.view.getFloat64(this.skip(8)));
      case 0xcc: return this.unsigned(1);
      case 0xcd: return this.unsigned(2);
      case 0xce: return this.unsigned(4);
      case 0xcf: return small(this.view.getBigUint64(this.skip(8)));
      case 0xd0: return this.view.getInt8(this.skip(1));
      case 0xd1: return this.view.getInt16(this.skip(2));
      case 0xd2: return this.view.getInt32(this.skip(4));
      case 0xd3: return small(this.view.getBigInt64(this.skip(8)));
      case 0xd9: return this.text(this.unsigned(1));
      case 0xda: return this.text(this.unsigned(2));
      case 0xdb: return this.text(this.unsigned(4));
      case 0xdc: return this.array(this.unsigned(2), depth);
      case 0xdd: return this.array(this.unsigned(4), depth);
      case 0xde: return this.map(this.unsigned(2), depth);
      case 0xdf: return this.map(this.unsigned(4), depth);
      default: throw new ProtocolError(`MessagePack byte 0x${head.toString(16)} is none of the protocol's types`);
    }
  }

  private skip(count: number): number {
    if (count > this.data.length - this.at) throw new ProtocolError("MessagePack is cut short");
    this.at += count;
    return this.at - count;
  }

  private take(count: number): Uint8Array {
    const start = this.skip(count);
    return this.data.subarray(start, start + count);
  }

  private unsigned(bytes: 1 | 2 | 4): number {
    const start = this.skip(bytes);
    if (bytes === 1) return this.view.getUint8(start);
    return bytes === 2 ? this.view.getUint16(start) : this.view.getUint32(start);
  }

  private bytes(count: number): Uint8Array {
    return this.take(count).slice();
  }

  private text(count: number): string {
    try {
      return utf8.decode(this.take(count));
    } catch (error) {
      if (error instanceof ProtocolError) throw error;
      throw new ProtocolError("a text of MessagePack is no UTF-8");
    }
  }

  private array(count: number, depth: number): Value[] {
    if (count > this.data.length - this.at) throw new ProtocolError("MessagePack is cut short");
    return Array.from({ length: count }, () => this.value(depth + 1));
  }

  private map(count: number, depth: number): ValueMap {
    const found: ValueMap = new Map();
    for (let index = 0; index < count; index++) {
      const key = this.value(depth + 1);
      if (typeof key !== "string" && typeof key !== "number" && typeof key !== "bigint") {
        throw new ProtocolError("a key of a MessagePack map is no text and no whole number");
      }
      found.set(key, this.value(depth + 1));
    }
    return found;
  }
}

function small(value: bigint): number | bigint {
  const number = Number(value);
  return Number.isSafeInteger(number) ? number : value;
}

/** The one value in `data`; ProtocolError if it is none, or something follows it. */
export function decode(data: Uint8Array): Value {
  const reader = new Reader(data);
  const value = reader.value(0);
  if (!reader.isAtEnd) throw new ProtocolError("something follows the MessagePack value");
  return value;
}

/** Writes values with the shortest encoding of whole numbers; floats are always float 64. */
export class Writer {
  private data = new Uint8Array(256);
  private view = new DataView(this.data.buffer);
  private at = 0;

  finish(): Uint8Array {
    return this.data.slice(0, this.at);
  }

  nil(): void {
    this.byte(0xc0);
  }

  bool(value: boolean): void {
    this.byte(value ? 0xc3 : 0xc2);
  }

  float(value: number): void {
    this.byte(0xcb);
    const place = this.room(8);
    this.view.setFloat64(place, value);
  }

  int(value: number | bigint): void {
    const whole = BigInt(value);
    if (whole >= 0n) this.unsigned(whole);
    else this.negative(whole);
  }

  text(value: string): void {
    const bytes = encoder.encode(value);
    if (bytes.length < 32) this.byte(0xa0 | bytes.length);
    else this.head(bytes.length, 0xd9, 0xda, 0xdb);
    this.raw(bytes);
  }

  bytes(value: Uint8Array): void {
    this.head(value.length, 0xc4, 0xc5, 0xc6);
    this.raw(value);
  }

  array(count: number): void {
    if (count < 16) this.byte(0x90 | count);
    else this.head(count, null, 0xdc, 0xdd);
  }

  map(count: number): void {
    if (count < 16) this.byte(0x80 | count);
    else this.head(count, null, 0xde, 0xdf);
  }

  private unsigned(value: bigint): void {
    if (value < 128n) this.byte(Number(value));
    else if (value <= 0xffffffffn) this.head(Number(value), 0xcc, 0xcd, 0xce);
    else {
      this.byte(0xcf);
      const place = this.room(8);
      this.view.setBigUint64(place, value);
    }
  }

  private negative(value: bigint): void {
    const number = Number(value);
    if (number >= -32) this.byte(number & 0xff);
    else if (number >= -128) {
      this.byte(0xd0);
      const place = this.room(1);
      this.view.setInt8(place, number);
    } else if (number >= -32768) {
      this.byte(0xd1);
      const place = this.room(2);
      this.view.setInt16(place, number);
    } else if (number >= -2147483648) {
      this.byte(0xd2);
      const place = this.room(4);
      this.view.setInt32(place, number);
    } else {
      this.byte(0xd3);
      const place = this.room(8);
      this.view.setBigInt64(place, value);
    }
  }

  private head(count: number, one: number | null, two: number, four: number): void {
    if (one !== null && count < 256) {
      this.byte(one);
      this.byte(count);
    } else if (count < 65536) {
      this.byte(two);
      const place = this.room(2);
      this.view.setUint16(place, count);
    } else {
      this.byte(four);
      const place = this.room(4);
      this.view.setUint32(place, count);
    }
  }

  private byte(value: number): void {
    const place = this.room(1); // which may take other memory
    this.data[place] = value;
  }

  private raw(bytes: Uint8Array): void {
    const start = this.room(bytes.length);
    this.data.set(bytes, start);
  }

  private room(count: number): number {
    const needed = this.at + count;
    if (needed > this.data.length) {
      const larger = new Uint8Array(Math.max(needed, 2 * this.data.length));
      larger.set(this.data.subarray(0, this.at));
      this.data = larger;
      this.view = new DataView(larger.buffer);
    }
    this.at = needed;
    return needed - count;
  }
}
