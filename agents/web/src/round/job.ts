/** The round a device works on. */
import type { Job } from "../store/rows";
import { at, formatsOf, offerOf, takes } from "../wire/announced";
import type { BlobRef } from "../wire/blobs";
import { digestNow, hex, utf8 } from "../wire/digests";
import type { Round, Task } from "../wire/messages";
import { byName } from "../wire/tensors";
import { NO_SHARD } from "../wire/topics";

/**
 * The job of a task for an engine that runs `format`; null while the announcement is of other rounds or does not offer the
 * tier. If it offers it in other formats only, it is a job in one of these, for the device to decline.
 */
export function jobOf(task: Task, announced: Round, format: string): Job | null {
  const own = task.run === announced.run ? at(announced, task.round) : null;
  const offered = formatsOf(announced, task.tier);
  if (own === null || !offered.length) return null;
  const chosen = offered.includes(format) ? format : offered[0]!;
  const offer = offerOf(announced, chosen);
  return {
    run: task.run,
    round: task.round,
    tier: task.tier,
    seed: task.seed,
    nonce: task.nonce,
    samples: task.samples,
    model_version: own.model_version,
    bundle: offer.bundles[task.tier]!,
    units: { ...own.units },
    hyper: { ...own.hyper },
    signature: offer.signatures[task.tier] ?? new Uint8Array(),
    base: announced.base,
    format: chosen,
    tries: 0,
    ask: task.ask === true,
    progress_s: task.progress_s ?? 0,
    shard: task.shard !== undefined && task.shard >= 0 ? task.shard : NO_SHARD,
  };
}

/** This job as its round is announced now; seed, nonce and samples are those of the task. */
export function following(job: Job, announced: Round, format: string): Job | null {
  const now = jobOf({ v: 1, ...job }, announced, format);
  return now && { ...now, tries: job.tries };
}

function lines(job: Job): string {
  const units = Object.entries(job.units).sort(([one], [other]) => byName(one, other));
  return units.map(([name, refs]) => `${name}=${refs.map((ref) => ref.sha256).join(",")}\n`).join("");
}

/** Digests of the bundle and of what makes up the units: with the same ones, work that was begun can go on. */
export const contentOf = (job: Job): string => `${job.bundle.sha256}\n${lines(job)}`;

/** Names the weights that the round gives to devices. */
export const weightsOf = (job: Job): string => hex(digestNow(utf8(lines(job))));

/** The unit's whole blob, and the patches to it in order; empty if the round does not announce it. */
export const lineOf = (job: Job, unit: string): BlobRef[] => job.units[unit] ?? [];

/** Whether this job's round takes updates by what is announced. */
export function isOpen(job: Job, announced: Round): boolean {
  return job.run === announced.run && takes(announced).includes(job.round);
}

/** Whether the server has given this device another task since: it has one at a time. */
export function isReplaced(job: Job, task: Task | null): boolean {
  return task !== null && task.nonce !== "" && task.run === job.run && task.round >= job.round && task.nonce !== job.nonce;
}
