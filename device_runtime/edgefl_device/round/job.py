"""Job of a device: a task and its announcement, as the store keeps them."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from edgefl.wire.blobs import BlobRef
from edgefl.wire.mqtt.messages import MALFORMED, Round, Task
from edgefl.wire.mqtt.topics import NO_SHARD


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A task together with what the round's announcement says about its tier: enough to start, or to start again.

    ``format`` is the format of the graphs in ``bundle``: the requested one, if the tier is offered in it. ``tries``
    counts the processes, or engines, that began to work on it.
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
        """Return the job of a task for an engine that runs ``format``, or None while the announcement is of other rounds
        or does not offer the tier. If it offers it in other formats only, it is a job in one of these, for the device to
        decline."""
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
        """Return this job as ``announced`` describes its round now, or None as :meth:`of` does."""
        announcement = _announcement(announced, self.run, self.round, self.tier, format)
        return None if announcement is None else msgspec.structs.replace(self, **announcement)

    @property
    def content(self) -> tuple[str, dict[str, tuple[str, ...]]]:
        """Digests of the bundle and of what makes up the units: with the same ones, work that was begun can continue."""
        return self.bundle.sha256, {
            name: tuple(ref.sha256 for ref in refs) for name, refs in sorted(self.units.items())
        }

    @property
    def weights(self) -> str:
        """Names the weights that the round gives to devices: SHA-256 over the digests of what makes up the units.

        The model version names the server's own weights, and the same ones may be announced with other patches.
        """
        whole = hashlib.sha256()
        for name, digests in self.content[1].items():
            whole.update(f"{name}={','.join(digests)}\n".encode())
        return whole.hexdigest()

    def line(self, unit: str) -> tuple[BlobRef, ...]:
        """Return the unit's whole blob, and the patches to it in order; empty if the round does not announce it."""
        return self.units.get(unit, ())

    def is_open(self, announced: Round) -> bool:
        """Return True if this job's round takes updates according to ``announced``."""
        return self.run == announced.run and self.round in announced.takes

    def is_replaced(self, task: Task | None) -> bool:
        """Return True if the server has sent another ``task`` since: a device has one at a time."""
        return (
            task is not None
            and bool(task.nonce)
            and task.run == self.run
            and task.round >= self.round
            and task.nonce != self.nonce
        )


def _announcement(announced: Round, run: str, number: int, tier: str, format: str) -> dict[str, Any] | None:
    """Return the fields of a job that come from the announcement, or None if it is of other rounds or lacks the tier."""
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
    """Return the job in ``data``; None if another release of the runtime wrote it and it cannot be read."""
    try:
        return msgspec.msgpack.decode(data, type=Job)
    except MALFORMED:
        return None
