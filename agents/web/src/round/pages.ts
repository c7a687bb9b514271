/** What an announcement offers, where that is too much for one message: a blob, for devices that need it. */
import { whole } from "../wire/announced";
import { BundleError } from "../wire/errors";
import type { Limits } from "../wire/limits";
import type { Round } from "../wire/messages";
import { mebibytes } from "./bounds";
import type { Blobs } from "./graph_loader";

/** The announcement with all that it offers; BundleError if that is more than a device reads, or cannot be had. */
export async function readPages(announced: Round, blobs: Blobs, limits: Limits): Promise<Round> {
  const page = announced.pages;
  if (page === null) return announced;
  const largest = Math.max(page.size, page.raw);
  if (largest > limits.max_manifest_bytes) {
    throw new BundleError(
      `the page of the announcement of round ${announced.round} has ${mebibytes(largest)}, more than this device reads: raise ` +
        "limits.max_manifest_bytes, or have the server use larger chunks",
    );
  }
  return whole(announced, await blobs.get(page));
}
