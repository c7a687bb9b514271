"""Loading graphs, fetching the weights of units, and feeding ports: what the forward pass and training share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np

from edgefl.errors import BundleError, DataError, RoundAborted
from edgefl.wire import tensors
from edgefl.wire.blobs import BlobRef
from edgefl.wire.bundle.manifest import Graph, Manifest, Port
from edgefl.wire.patches import patched, widened
from edgefl.wire.tensors import Array, Arrays
from edgefl_device.engine.base import Engine, LoadedGraph, Outputs, State
from edgefl_device.round.costs import Profiler
from edgefl_device.round.job import Job
from edgefl_device.round.tuning import Forms, Tuning
from edgefl_device.store.checkpoint_rows import Checkpoint


class Blobs(Protocol):
    """Where blobs come from: the broker, or a file."""

    def get(self, ref: BlobRef) -> bytes: ...

    def get_all(self, refs: Sequence[BlobRef]) -> Iterable[bytes]:
        """All of them are brought here first, and then read one by one."""


class Memory(Protocol):
    """Where checkpoints live between processes."""

    def save_checkpoint(self, nonce: str, checkpoint: Checkpoint) -> None:
        """Keep it whole or not at all, in place of any other; its tensors are made as they are drawn."""

    def checkpoint(self, nonce: str) -> Checkpoint | None:
        """The one kept for this task, if there is one."""


@dataclass(frozen=True)
class Step:
    """Where a round stands, for people who watch."""

    stage: str
    step: int
    steps: int
    loss: float
    step_ms: float


@dataclass(frozen=True)
class GraphSettings:
    """What the agent decides for a round. ``room`` is asked for bytes on the disk beside the store, ``between`` is called
    between steps: both raise RoundDeclined where there is an end to it. ``worked`` is told the milliseconds of each."""

    folder: Path
    checkpoint_steps: int
    watch: Callable[[Step], None] = lambda _: None
    aborted: Callable[[], bool] = lambda: False
    tuning: Tuning | None = None
    room: Callable[[int], None] = lambda _: None
    between: Callable[[], None] = lambda: None
    worked: Callable[[float], None] = lambda _: None

    def check_aborted(self) -> None:
        """Between two steps: RoundAborted if the round is over, RoundDeclined if it is to end here."""
        if self.aborted():
            raise RoundAborted("the round ended before this device was done")
        self.between()


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


@dataclass(eq=False)
class Graphs:
    """A manifest's graphs and the round's weights, brought in when they are needed."""

    engine: Engine
    manifest: Manifest
    blobs: Blobs
    profiler: Profiler
    tuning: Tuning | None = None

    def __post_init__(self) -> None:
        self.residency = Residency()
        self.forms = Forms(self.engine, self.blobs, self.tuning)

    def load(self, name: str) -> LoadedGraph:
        spec = self.manifest.graph(name)
        with self.profiler.timed("load"):
            artifact, threads = self.forms.artifact(spec)
            return self.engine.load(spec, artifact, threads)

    def run_once(self, name: str, feeds: Arrays, state: State) -> Outputs:
        """Run a graph that no step repeats, and drop it."""
        graph = self.load(name)
        with self.profiler.timed(name):
            return graph.run(feeds, state)

    def fetch(self, job: Job, units: Sequence[str]) -> Arrays:
        """The weights of some units, by global name."""
        lines = {unit: job.line(unit) for unit in units}
        missing = [unit for unit, line in lines.items() if not line]
        if missing:
            raise BundleError(
                f"round {job.round} announces no weights for units {missing}; export the bundle again"
            )
        # One request for all of it: a store that is nearly full must not drop one part to make room for another.
        blobs = iter(self.blobs.get_all([ref for line in lines.values() for ref in line]))
        weights: Arrays = {}
        for line in lines.values():
            weights |= _put_together(len(line), blobs)
        self.residency.hold(units, weights)
        return weights

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


def _put_together(count: int, blobs: Iterator[bytes]) -> Arrays:
    """A unit's tensors from the next ``count`` blobs: whole, in float32 where they travelled in float16, and patches."""
    weights = widened(tensors.load(next(blobs)))
    for _ in range(count - 1):
        weights = patched(weights, next(blobs))
    return weights


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
