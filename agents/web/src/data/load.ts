/** Where a device's samples come from, as the page says it. */
import type { Data, RawArray } from "../worker/messages";
import { type Arr, fromBytes, isDtype } from "../wire/arrays";
import { DataError } from "../wire/errors";
import { readNpz } from "./npz";
import { Photos } from "./photos";
import { type LocalSamples, LocalArrays } from "./samples";

export async function load(data: Data): Promise<LocalSamples> {
  switch (data.kind) {
    case "npz": return LocalArrays.of(readNpz(new Uint8Array(data.bytes), "the .npz"), "the .npz");
    case "url": return LocalArrays.of(readNpz(await fetched(data.url), data.url), data.url);
    case "photos": return new Photos(data.photos);
    case "arrays": {
      const others = Object.entries(data.others ?? {}).map(([name, raw]) => [name, arrayOf(name, raw)] as const);
      return LocalArrays.of({ ...Object.fromEntries(others), x: arrayOf("x", data.x), y: arrayOf("y", data.y) }, "the arrays");
    }
  }
}

async function fetched(url: string): Promise<Uint8Array> {
  const answer = await fetch(url);
  if (!answer.ok) throw new DataError(`${url} cannot be read as training data: the server answers ${answer.status}`);
  return new Uint8Array(await answer.arrayBuffer());
}

function arrayOf(name: string, raw: RawArray): Arr {
  if (!isDtype(raw.dtype)) throw new DataError(`the array ${name} is ${raw.dtype}, which is no type of numpy's numbers`);
  return fromBytes(raw.dtype, raw.shape, new Uint8Array(raw.data));
}
