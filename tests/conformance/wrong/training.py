"""Faults in training: rows, noise, scalars, carry and what an update holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from edgefl.wire import bits
from edgefl.wire.bits import Packed
from edgefl.wire.bundle.manifest import Manifest
from edgefl.wire.tensors import Array
from edgefl_device.data import samples
from edgefl_device.data.samples import Batches, DataPass, FittedData
from edgefl_device.round import executor, scheduler, trainer
from edgefl_device.round.carry import RestoredCarry
from edgefl_device.round.job import Job
from edgefl_device.store.database import Checkpoint, Store
from tests.conformance.wrong.update import changed


def all_rows() -> None:
    """Use all of its rows, however few the task asks for."""
    FittedData.first = lambda self, count: self  # type: ignore[method-assign]


def batch_order() -> None:
    """Take the rows of each batch from the end of the shuffled order."""
    original_order = Batches._order

    def backwards(self: Batches, stream: int) -> Array:
        return original_order(self, stream)[::-1]

    Batches._order = backwards  # type: ignore[method-assign]


def forgets_carry() -> None:
    """Begin each round from zeros."""
    executor.restore_carry = lambda *_: RestoredCarry()


def ignores_hyper() -> None:
    """Take every scalar from the manifest."""
    original_of = Job.of

    def without(*arguments: Any) -> Job | None:
        job = original_of(*arguments)
        return job and msgspec.structs.replace(job, hyper={})

    Job.of = without  # type: ignore[method-assign, assignment]


def keeps_abandoned_carry() -> None:
    """Go on from what it kept of a round that was abandoned."""
    original_of = Job.of

    def based(*arguments: Any) -> Job | None:
        job = original_of(*arguments)
        return job and msgspec.structs.replace(job, base=job.round - 1)

    Job.of = based  # type: ignore[method-assign, assignment]
    scheduler.drop_abandoned = lambda *_: None


def mask_gaps() -> None:
    """Write the gaps of a mask as the distances between its bits."""

    def distances(packed: Packed, count: int) -> bytes:
        places = np.flatnonzero(np.unpackbits(packed, bitorder="little")[:count])
        return bytes(int(gap) & 0x7F for gap in np.diff(places, prepend=0))

    bits.to_gaps = distances


def no_row_mask() -> None:
    """Count the rows that only fill the last batch of a pass over the data."""

    def ones(self: DataPass, step: int) -> Array:
        return np.ones(self.batch, np.float32)

    DataPass.mask = ones  # type: ignore[method-assign]


def noise_off_by_one() -> None:
    """Count the steps of its noise from 1."""
    original_noise = samples.noise

    def later(seed: int, step: int, port: int, shape: tuple[int, ...], dtype: str) -> Array:
        return original_noise(seed, step + 1, port, shape, dtype)

    samples.noise = later


def resumes_a_step_late() -> None:
    """Go on behind the step that its checkpoint is about."""
    original_checkpoint = Store.checkpoint

    def later(self: Store, nonce: str) -> Checkpoint | None:
        saved = original_checkpoint(self, nonce)
        if saved is None:
            return None
        return Checkpoint(saved.step + 1, saved.sums, saved.tensors, saved.basis)

    Store.checkpoint = later  # type: ignore[method-assign]


def seed_as_double() -> None:
    """Keep the seed in a number that has 53 bits."""
    original_of = Job.of

    def rounded(*arguments: Any) -> Job | None:
        job = original_of(*arguments)
        return job and msgspec.structs.replace(job, seed=int(float(job.seed)))

    Job.of = rounded  # type: ignore[method-assign, assignment]


def summed_metrics() -> None:
    """Send the sums of its metrics in place of their means."""

    def sums(manifest: Manifest, found: Mapping[str, float], steps: Sequence[int]) -> dict[str, float]:
        return dict(found)

    trainer.mean_metrics = sums


def wrong_samples() -> None:
    """Say that it used all of its rows."""
    changed(lambda executor, update: {"samples": len(executor._data)})
