/** Watches the packets of MQTT that come in, because MQTT.js holds one of any size until it is whole. */
import type { Limits } from "../wire/limits";

const PUBLISH = 3;
const QOS_2 = 4;
/** Room for what is around a payload. No packet but a PUBLISH is larger. */
const HEADER_BYTES = 64 * 1024;

/** Size of the largest message to read. */
export function readableBytes(limits: Limits): number {
  return Math.max(limits.max_message_bytes, limits.chunk_bytes);
}

/** Size of the largest packet to read. */
export function mostBytes(limits: Limits): number {
  return readableBytes(limits) + HEADER_BYTES;
}

export class PacketWatch {
  /** Of the packet at hand: its first byte (-1 before it), its size so far, the weight of the next digit, and what is left. */
  private first = -1;
  private size = 0;
  private weight = 1;
  private left = 0;

  constructor(private readonly most: number) {}

  /** Why the connection has to end after these bytes; empty if it may go on. */
  objection(chunk: Uint8Array): string {
    for (let at = 0; at < chunk.length; ) {
      if (this.left > 0) {
        const passed = Math.min(this.left, chunk.length - at);
        this.left -= passed;
        at += passed;
      } else if (this.first < 0) {
        this.first = chunk[at++]!;
        if (this.first >> 4 === PUBLISH && this.first & QOS_2) return "the broker sent a message of QoS 2, which nobody asked for";
      } else {
        const digit = chunk[at++]!;
        this.size += (digit & 127) * this.weight;
        this.weight *= 128;
        if (digit & 128) continue;
        const most = this.first >> 4 === PUBLISH ? this.most : HEADER_BYTES;
        if (this.size > most) return `the broker sent a packet of ${this.size} bytes, and ${most} is the most that is read`;
        this.left = this.size;
        [this.first, this.size, this.weight] = [-1, 0, 1];
      }
    }
    return "";
  }
}
