/** Photos that a person picks, by class; kept in the browser, so that a page that is loaded again needs no new pick. */
import { openDB, type IDBPDatabase } from "idb";

export interface Photo {
  name: string;
  label: string;
  file: Blob;
}

const IMAGES = /\.(png|jpe?g|webp|gif|bmp|avif|heic)$/i;
const STORE = "picked";

/** Those of a folder whose folders are classes; `skipped` are files that are no images, or lie in no class. */
export function fromFolder(files: Iterable<File>): { photos: Photo[]; skipped: number } {
  const photos: Photo[] = [];
  let skipped = 0;
  const sorted = [...files].sort((one, other) => (one.webkitRelativePath < other.webkitRelativePath ? -1 : 1));
  for (const file of sorted) {
    const parts = file.webkitRelativePath.split("/");
    const label = parts.length >= 3 ? (parts[parts.length - 2] ?? "") : "";
    if (label === "" || !isImage(file)) skipped += 1;
    else photos.push({ name: file.webkitRelativePath, label, file });
  }
  return { photos, skipped };
}

export function ofClass(files: Iterable<File>, label: string): Photo[] {
  return [...files].filter(isImage).map((file) => ({ name: `${label}/${file.name}`, label, file }));
}

/** `cat 12, dog 9`. */
export function counted(photos: Photo[]): string {
  const counts = new Map<string, number>();
  for (const { label } of photos) counts.set(label, (counts.get(label) ?? 0) + 1);
  return [...counts].map(([label, count]) => `${label} ${count}`).join(", ");
}

/** Classes of `photos` that the model does not have; none where it names none. */
export function unknown(photos: Photo[], classes: string[]): string[] {
  const known = new Set(classes);
  return known.size === 0 ? [] : [...new Set(photos.map(({ label }) => label))].filter((label) => !known.has(label));
}

function isImage(file: File): boolean {
  return file.type.startsWith("image/") || IMAGES.test(file.name);
}

/** The page's own database; the agent has another one. */
async function database(): Promise<IDBPDatabase> {
  return openDB("edgefl-page", 1, { upgrade: (made) => void made.createObjectStore(STORE) });
}

export async function keep(federation: string, photos: Photo[]): Promise<void> {
  // A picked file may be gone by the next visit: what is kept are its bytes, read one after the other.
  const whole: Photo[] = [];
  for (const photo of photos) whole.push({ ...photo, file: new Blob([await photo.file.arrayBuffer()], { type: photo.file.type }) });
  await (await database()).put(STORE, whole, federation);
}

export async function kept(federation: string): Promise<Photo[]> {
  try {
    return ((await (await database()).get(STORE, federation)) as Photo[] | undefined) ?? [];
  } catch {
    return []; // storage is refused
  }
}
