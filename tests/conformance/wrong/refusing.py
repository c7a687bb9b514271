"""Faults in what an agent checks and declines."""

from __future__ import annotations

from typing import Any

import msgspec

from edgefl.errors import RoundDeclined
from edgefl.wire.blobs import BlobRef
from edgefl.wire.bundle.manifest import Manifest, decode_manifest
from edgefl.wire.mqtt.messages import Decline
from edgefl_device.link import fetch
from edgefl_device.round import executor, scheduler
from edgefl_device.round.executor import RoundExecutor
from edgefl_device.round.job import Job
from edgefl_device.round.scheduler import RoundScheduler
from edgefl_device.store.database import PastRound


def any_manifest() -> None:
    """Read a manifest of any version as one of its own."""

    def read(data: bytes) -> Manifest:
        fields = msgspec.msgpack.decode(data)
        return decode_manifest(msgspec.msgpack.encode({**fields, "v": 1}))

    executor.decode_manifest = read


def declines_once() -> None:
    """Say a decline once, though nobody acknowledges it."""
    RoundScheduler.declines = lambda self: []  # type: ignore[method-assign]


def no_blob_digest() -> None:
    """Check each chunk, and not the blob that they make."""
    fetch.verify_blob = lambda ref, data: data


def no_chunk_digest() -> None:
    """Take every chunk and every blob as it comes."""
    BlobRef.accepts = lambda self, index, data: True  # type: ignore[method-assign]
    fetch.verify_blob = lambda ref, data: data


def no_memory_check() -> None:
    """Begin whatever it is offered, however much memory that needs."""
    RoundExecutor.check_memory = lambda *_: None  # type: ignore[method-assign, assignment]


def other_runs() -> None:
    """Work on a task of any run."""
    original_of = Job.of

    def ours(task: Any, announced: Any, format: str = "onnx") -> Job | None:
        return original_of(msgspec.structs.replace(task, run=announced.run), announced, format)

    Job.of = ours  # type: ignore[method-assign, assignment]


def tells_details() -> None:
    """Send the details of a decline, which may hold paths and values of the data."""

    def with_text(past: PastRound) -> Decline:
        return Decline(round=past.round, nonce=past.nonce, reason=past.reason, text=past.text)

    scheduler.decline_message = with_text


def wrong_reason() -> None:
    """Have one reason for whatever it declines."""
    original_decline = scheduler.RoundScheduler._decline

    def failed(self: scheduler.RoundScheduler, job: object, declined: RoundDeclined) -> object:
        return original_decline(self, job, RoundDeclined("failed", declined.message))  # type: ignore[arg-type]

    scheduler.RoundScheduler._decline = failed  # type: ignore[method-assign, assignment]
