"""Loading graphs, fetching the weights of units, and feeding ports: what the forward pass and training share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np

from device_runtime.checkpoint import Checkpoint
from device_runtime.engine.base import Engine, LoadedGraph
from device_runtime.job import Job
from device_runtime.profiler import Profiler
from edgefl.wire import tensors
from edgefl.wire.blobs import BlobRef
from edgefl.wire.errors import BundleError, DataError, RoundAborted
from edgefl.wire.manifest import Graph, Manifest, Port
from edgefl.wire.patches import patched, widened
from edgefl.wire.tensors import Array, Arrays


class Blobs(Protocol):
    """Where blobs come from: the broker, or a file."""

    def get(self, ref: BlobRef) -> bytes: ...

    def get_all(self, refs: Sequence[BlobRef]) -> list[bytes]: ...


class Memory(Protocol):
    """Where checkpoints live between processes."""

    def save_checkpoint(self, nonce: str, checkpoint: Checkpoint) -> None:
        """Keep it whole or not at all, in place of any other; its tensors are made as they are drawn."""
        ...

    def checkpoint(self, nonce: str) -> Checkpoint | None:
        """The one kept for this task, if there is one."""
        ...


@dataclass(frozen=True)
class Step:
    """Where a round stands, for people who watch."""

    stage: str
    step: int
    steps: int
    loss: float
    step_ms: float


@dataclass(frozen=True)
class Settings:
    """What the agent decides for a round."""

    folder: Path
    checkpoint_steps: int
    watch: Callable[[Step], None] = lambda _: None
    aborted: Callable[[], bool] = lambda: False

    def check_aborted(self) -> None:
        if self.aborted():
            raise RoundAborted("the round ended before this device was done")


@dataclass
class Residency:
    """Which units' weights are in memory, the most that ever were (invariant I10), and every download (I11)."""

    held: set[str] = field(default_factory=set)
    most: int = 0
    downloads: list[tuple[str, ...]] = field(default_factory=list)
    elements: int = 0

    def hold(self, units: Sequence[str], weights: Arrays) -> None:
        self.downloads.append(tuple(units))
        self.held.update(units)
        self.most = max(self.most, len(self.held))
        self.elements += sum(array.size for array in weights.values())

    def drop(self, units: Sequence[str]) -> None:
        self.held.difference_update(units)


class Graphs:
    """A manifest's graphs and the round's weights, brought in when they are needed."""

    def __init__(self, engine: Engine, manifest: Manifest, blobs: Blobs, profiler: Profiler) -> None:
        self._engine = engine
        self._manifest = manifest
        self._blobs = blobs
        self._profiler = profiler
        self.residency = Residency()

    def load(self, name: str) -> LoadedGraph:
        spec = self._manifest.graph(name)
        with self._profiler.timed("load"):
            return self._engine.load(spec, self._blobs.get(spec.blob))

    def fetch(self, job: Job, units: Sequence[str]) -> Arrays:
        """The weights of some units, by global name."""
        missing = [unit for unit in units if unit not in job.units]
        if missing:
            raise BundleError(
                f"round {job.round} announces no weights for units {missing}; export the bundle again"
            )
        found = self._whole(job, units)
        self._patch(job, found)
        weights = {name: array for unit in units for name, array in found[unit].items()}
        self.residency.hold(units, weights)
        return weights

    def _whole(self, job: Job, units: Sequence[str]) -> dict[str, Arrays]:
        """Per unit its whole blob, in float32 where it travelled in float16."""
        blobs = self._blobs.get_all([job.units[unit] for unit in units])
        return {unit: widened(tensors.load(blob)) for unit, blob in zip(units, blobs, strict=True)}

    def _patch(self, job: Job, found: dict[str, Arrays]) -> None:
        """Bring the units up to date; one patch of each is in memory at a time."""
        for at in range(max((len(job.line(unit)) for unit in found), default=1) - 1):
            refs = {unit: job.line(unit)[1 + at] for unit in found if len(job.line(unit)) > 1 + at}
            for unit, blob in zip(refs, self._blobs.get_all([*refs.values()]), strict=True):
                found[unit] = patched(found[unit], blob)

    def weight_feeds(self, spec: Graph, weights: Arrays) -> Arrays:
        """The ``weights`` inputs of a graph; BundleError if one is missing or has another shape."""
        feeds: Arrays = {}
        for port in spec.inputs_of("weights"):
            if port.label not in weights:
                raise BundleError(
                    f"graph {spec.name!r} wants {port.label!r}, which the round's weights do not hold"
                )
            check_port(port, weights[port.label])
            feeds[port.name] = weights[port.label]
        return feeds


def labelled(arrays: Arrays, role: str) -> Arrays:
    """The arrays of one role, by label."""
    return {name.partition(".")[2]: array for name, array in arrays.items() if name.partition(".")[0] == role}


def check_port(port: Port, array: Array) -> None:
    """DataError or BundleError if ``array`` is not what ``port`` takes."""
    if array.shape != port.shape or array.dtype != np.dtype(port.dtype):
        kind = DataError if port.role == "batch" else BundleError
        raise kind(
            f"{port.name} should be {port.dtype} {port.shape}, found {array.dtype} {array.shape}: "
            "the data or the weights do not belong to this bundle",
            port=port.name,
        )
