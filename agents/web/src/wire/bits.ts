/** Packed bit masks and the gaps that they may travel as. */
import { ProtocolError } from "./errors";

const LONGEST = 9;

export function packedBytes(count: number): number {
  return Math.ceil(count / 8);
}

/** ProtocolError unless `packed` holds `count` bits and none beyond. */
export function checkPacked(packed: Uint8Array, count: number): void {
  const last = packed[packed.length - 1] ?? 0;
  if (packed.length !== packedBytes(count) || (count % 8 && last >> count % 8)) {
    throw new ProtocolError(`a packed mask of ${count} entries has ${packed.length} bytes, or bits beyond its last entry`);
  }
}

/** The varints of a packed mask: for each set bit the number of unset ones before it. */
export function toGaps(packed: Uint8Array, count: number): Uint8Array {
  checkPacked(packed, count);
  const out: number[] = [];
  let previous = -1;
  for (let byte = 0; byte < packed.length; byte++) {
    for (let rest = packed[byte]!; rest; rest &= rest - 1) {
      const index = 8 * byte + (31 - Math.clz32(rest & -rest));
      let gap = index - previous - 1;
      previous = index;
      for (; gap >= 128; gap = Math.floor(gap / 128)) out.push((gap & 127) | 128);
      out.push(gap);
    }
  }
  return Uint8Array.from(out);
}

/** The packed mask of `count` entries; ProtocolError if the gaps lead beyond it. */
export function fromGaps(data: Uint8Array, count: number): Uint8Array {
  const packed = new Uint8Array(packedBytes(count));
  let previous = -1;
  for (let at = 0; at < data.length;) {
    let gap = 0;
    for (let place = 0; ; place++) {
      const byte = data[at++];
      if (byte === undefined || place === LONGEST) {
        throw new ProtocolError(`a gap of a mask is cut short or longer than ${LONGEST} bytes; send the blob again`);
      }
      gap += (byte & 127) * 2 ** (7 * place);
      if (byte < 128) break;
    }
    previous += gap + 1;
    if (previous >= count) {
      throw new ProtocolError(`the gaps of a mask lead beyond its ${count} entries; send the blob again`);
    }
    packed[Math.floor(previous / 8)]! |= 1 << previous % 8;
  }
  return packed;
}
