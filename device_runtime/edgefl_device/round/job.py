"""Job of a device: a task together with its announcement, in the form that the store keeps."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from edgefl.wire.blobs import BlobRef
from edgefl.wire.mqtt.messages import MALFORMED, Round, Task
from edgefl.wire.mqtt.topics import NO_SHARD


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """Task and the announcement's part for its tier: all that is needed to start, or to start again.

    Attributes:
        run: Name of the run.
        round: Number of the round.
        tier: The device's tier.
        seed: Seed of batches and noise.
        nonce: Identifier of the task, which the device's answer repeats.
        samples: Most local samples to use; 0: all.
        model_version: Digest of the server's weights.
        bundle: Manifest of the tier's bundle.
        units: Blobs of the weights by unit: whole weights first, then patches.
        hyper: Scalars of the round by label, such as the learning rate.
        signature: Signature of the bundle; b"" if there is none.
        base: Last completed round.
        format: Format of the graphs in ``bundle``: the requested one, if the tier is offered in it.
        tries: Number of processes or engines that began to work on the job.
        ask: True sends an offer before an update of several chunks.
        progress_s: Least seconds between two messages of progress.
        shard: Shard of the topics for the update.
    """

    run: str
    round: int
    tier: str
    seed: int
    nonce: str
    samples: int
    model_version: str
    bundle: BlobRef
    units: dict[str, tuple[BlobRef, ...]]
    hyper: dict[str, float]
    signature: bytes = b""
    base: int = 0
    format: str = "onnx"
    tries: int = 0
    ask: bool = False
    progress_s: float = 0.0
    shard: int = NO_SHARD

    @classmethod
    def of(cls, task: Task, announced: Round, format: str = "onnx") -> Job | None:
        """Return the job of a task, or None while the announcement is about other rounds or does not offer the tier.

        Args:
            task: The task.
            announced: The announcement with all of its offers.
            format: Format that the engine runs. If the tier is offered in others only, the job has one of these,
                and the device then declines it.
        """
        announcement = _announcement(announced, task.run, task.round, task.tier, format)
        if announcement is None:
            return None
        return cls(
            run=task.run,
            round=task.round,
            tier=task.tier,
            seed=task.seed,
            nonce=task.nonce,
            samples=task.samples,
            ask=task.ask is True,
            progress_s=task.progress_s if isinstance(task.progress_s, float) else 0.0,
            shard=task.shard if isinstance(task.shard, int) and task.shard >= 0 else NO_SHARD,
            **announcement,
        )

    def following(self, announced: Round, format: str = "onnx") -> Job | None:
        """Return this job with the fields that ``announced`` has for its round now.

        Return None if the announcement is about other rounds or does not offer the tier.
        """
        announcement = _announcement(announced, self.run, self.round, self.tier, format)
        return None if announcement is None else msgspec.structs.replace(self, **announcement)

    @property
    def content(self) -> tuple[str, dict[str, tuple[str, ...]]]:
        """Digest of the bundle, and digests of the weights by unit. Begun work can continue while they stay equal."""
        return self.bundle.sha256, {
            name: tuple(ref.sha256 for ref in refs) for name, refs in sorted(self.units.items())
        }

    @property
    def weights(self) -> str:
        """SHA-256 over the digests of all units: it identifies the weights that devices get.

        The model version identifies the server's own weights, which may be announced with different patches.
        """
        whole = hashlib.sha256()
        for name, digests in self.content[1].items():
            whole.update(f"{name}={','.join(digests)}\n".encode())
        return whole.hexdigest()

    def line(self, unit: str) -> tuple[BlobRef, ...]:
        """Return the blobs of a unit's weights: the whole weights, then the patches in order; empty if the round does
        not announce the unit.
        """
        return self.units.get(unit, ())

    def is_open(self, announced: Round) -> bool:
        """Return True if this job's round accepts updates according to ``announced``."""
        return self.run == announced.run and self.round in announced.takes

    def is_replaced(self, task: Task | None) -> bool:
        """Return True if ``task`` is a newer task of this run: a device has one task at a time."""
        return (
            task is not None
            and bool(task.nonce)
            and task.run == self.run
            and task.round >= self.round
            and task.nonce != self.nonce
        )


def _announcement(announced: Round, run: str, number: int, tier: str, format: str) -> dict[str, Any] | None:
    """Return the job's fields that come from the announcement, or None if it is about other rounds or lacks the tier.

    Args:
        announced: The announcement.
        run: Name of the job's run.
        number: Number of its round.
        tier: Its tier.
        format: Format that the engine runs; another one is used if the tier is offered in others only.
    """
    own = announced.at(number) if run == announced.run else None
    offered = announced.formats_of(tier)
    if own is None or not offered:
        return None
    format_name = format if format in offered else offered[0]
    offer = announced.offer(format_name)
    return {
        "model_version": own.model_version,
        "bundle": offer.bundles[tier],
        "units": own.units,
        "hyper": own.hyper,
        "signature": offer.signatures.get(tier, b""),
        "base": announced.base,
        "format": format_name,
    }


def encode_job(job: Job) -> bytes:
    return msgspec.msgpack.encode(job)


def decode_job(data: bytes) -> Job | None:
    """Return the job in ``data``; None if another release wrote it in another form."""
    try:
        return msgspec.msgpack.decode(data, type=Job)
    except MALFORMED:
        return None
