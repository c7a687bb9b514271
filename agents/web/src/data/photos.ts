/** Photos in a folder for each class: turned upright, in grey or RGB, stretched bilinearly to the model's size. */
import { type Arr, rowsOf, zeros } from "../wire/arrays";
import { DataError } from "../wire/errors";
import type { DataSpec } from "../wire/bundle/manifest";
import { fittedLabels, type LabelSpec } from "./labels";
import { resized } from "./resize";
import { FittedData, type LocalSamples, type Rows } from "./samples";

export interface Photo {
  name: string;
  label: string;
  file: Blob;
}

/** Decoded photos up to so many bytes stay in memory; beyond, each batch decodes its own. */
const MOST_BYTES = 64 << 20;
/** Of a photo as it is decoded, so that none takes the memory of the training. */
const MOST_PIXELS = 2 ** 26;

export class Photos implements LocalSamples {
  readonly source = "the photos";
  readonly count: number;
  /** What the last bundle made of them: the next round's is most often like it, and decoding takes long. */
  private last: [wanted: string, data: FittedData] | null = null;

  constructor(private readonly photos: readonly Photo[]) {
    if (!photos.length) throw new DataError("there is no photo: pick some of at least one class");
    this.count = photos.length;
  }

  async fitted(spec: DataSpec, label: LabelSpec): Promise<FittedData> {
    const wanted = JSON.stringify([spec, label]);
    if (this.last?.[0] !== wanted) {
      this.last = null;
      this.last = [wanted, await this.read(spec, label)];
    }
    return this.last[1];
  }

  private async read(spec: DataSpec, label: LabelSpec): Promise<FittedData> {
    const [channels, height, width] = spec.shape;
    const reader = spec.reader;
    if (spec.shape.length !== 3 || (channels !== 1 && channels !== 3) || (reader && reader.kind !== "image")) {
      throw new DataError(
        `photos become samples of shape (1, H, W) or (3, H, W), the model takes ${reader?.kind ?? "samples of"} ` +
          `(${spec.shape}): give arrays (.npz)`,
      );
    }
    const white = reader?.kind === "image" ? reader.white : 255;
    const decode = (photo: Photo) => decoded(photo, channels, height!, width!, white);
    const y = { dtype: "int64" as const, shape: [this.count], data: BigInt64Array.from(this.photos, (each) => BigInt(classOf(each, spec))) };
    const size = this.count * channels * height! * width!;
    const all = size <= MOST_BYTES ? stacked(await inTurn(this.photos, decode), spec) : null;
    const take = async (rows: Rows) =>
      all ? rowsOf(all, rows) : stacked(await inTurn(Array.from(rows, (row) => this.photos[row]!), decode), spec);
    const lengths = new Int32Array(this.count).fill(channels);
    return new FittedData({ dtype: "uint8", take }, fittedLabels(y, label, spec.classes, this.source), spec, {}, label, lengths);
  }
}

async function inTurn(photos: readonly Photo[], decode: (photo: Photo) => Promise<Uint8Array>): Promise<Uint8Array[]> {
  const found = [];
  for (const photo of photos) found.push(await decode(photo));
  return found;
}

function stacked(images: Uint8Array[], spec: DataSpec): Arr {
  const whole = zeros("uint8", [images.length, ...spec.shape]);
  images.forEach((image, place) => (whole.data as Uint8Array).set(image, place * image.length));
  return whole;
}

/** A device never numbers its own classes: a label is one of the federation's names, or a number in writing. */
function classOf(photo: Photo, spec: DataSpec): number {
  const place = spec.names.indexOf(photo.label);
  if (place >= 0) return place;
  if (!spec.names.length && /^[0-9]+$/.test(photo.label)) return Number(photo.label);
  const known = spec.names.length ? spec.names.join(", ") : `0 to ${spec.classes - 1}`;
  throw new DataError(`${photo.name}: '${photo.label}' is no class of this federation: ${known}`);
}

/** uint8 (channels, height, width). The browser turns a photo as its EXIF says. */
async function decoded(photo: Photo, channels: number, height: number, width: number, white: number): Promise<Uint8Array> {
  let bitmap: ImageBitmap;
  try {
    bitmap = await createImageBitmap(photo.file, { imageOrientation: "from-image", colorSpaceConversion: "none" });
  } catch (error) {
    throw new DataError(`${photo.name} is no image that can be read: ${String(error)}; take it away, or pick another`);
  }
  const { width: wide, height: high } = bitmap;
  if (wide * high > MOST_PIXELS) {
    bitmap.close();
    throw new DataError(`${photo.name} has ${wide} x ${high} pixels, more than ${MOST_PIXELS}: make it smaller`);
  }
  const context = new OffscreenCanvas(wide, high).getContext("2d", { willReadFrequently: true })!;
  context.drawImage(bitmap, 0, 0);
  bitmap.close();
  const planes = planesOf(context.getImageData(0, 0, wide, high).data, channels);
  const size = height * width;
  const out = new Uint8Array(channels * size);
  planes.forEach((plane, channel) => out.set(resized(plane, wide, high, width, height), channel * size));
  return white === 255 ? out : out.map((value) => Math.floor((value * white + 127) / 255));
}

/** Of pixels of four bytes: red, green and blue, or grey by Pillow's weights. */
function planesOf(pixels: Uint8ClampedArray, channels: number): Uint8Array[] {
  const count = pixels.length / 4;
  const planes = Array.from({ length: channels }, () => new Uint8Array(count));
  for (let at = 0; at < count; at++) {
    const [red, green, blue] = [pixels[4 * at]!, pixels[4 * at + 1]!, pixels[4 * at + 2]!];
    if (channels === 1) planes[0]![at] = (red * 19595 + green * 38470 + blue * 7471 + 0x8000) >> 16;
    else {
      planes[0]![at] = red;
      planes[1]![at] = green;
      planes[2]![at] = blue;
    }
  }
  return planes;
}
