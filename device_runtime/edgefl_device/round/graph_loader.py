"""Graphs of a bundle and weights of a round, loaded when they are needed, and the time and memory of running them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from edgefl.errors import BundleError, DataError
from edgefl.wire import tensors
from edgefl.wire.blobs import BlobRef
from edgefl.wire.bundle.manifest import Graph, Manifest, Port
from edgefl.wire.patches import apply_patch, to_float32
from edgefl.wire.tensors import Array, Arrays
from edgefl_device.engine.base import Engine, LoadedGraph, Outputs, State
from edgefl_device.host import anonymous_bytes
from edgefl_device.round.autotune import Autotuner, GraphVariants
from edgefl_device.round.job import Job
from edgefl_device.sandbox.process import used_bytes
from edgefl_device.store.database import Checkpoint


class BlobSource(Protocol):
    """Interface of a source of blobs: the broker, a folder or memory."""

    def get(self, ref: BlobRef) -> bytes: ...

    def get_all(self, refs: Sequence[BlobRef]) -> Iterable[bytes]:
        """Make all blobs ``refs`` available, then return their decompressed bytes one by one."""


class RoundStore(Protocol):
    """Interface of a round's persistent storage: checkpoints, and disk space for stored activations (records)."""

    def save_checkpoint(self, nonce: str, checkpoint: Checkpoint) -> None:
        """Replace the stored checkpoint atomically. Its tensors are read one by one."""

    def checkpoint(self, nonce: str) -> Checkpoint | None:
        """Return the last checkpoint of the task ``nonce``; None if there is none."""

    def make_room_beside(self, nbytes: int) -> None:
        """Free disk space for a file of ``nbytes``.

        Raises:
            StoreError: The limit of the store cannot be met.
        """


class RoundProfiler:
    """Times of one round by name, and the highest memory after a timed part.

    An engine keeps the memory of a step until its graph is dropped, so the memory after a step is the step's peak.

    Args:
        engine: Engine whose own process counts too, above its idle memory; None if it has no process of its own.
    """

    def __init__(self, engine: Engine | None = None) -> None:
        self._engine = engine
        self.idle_bytes = self.most_bytes = anonymous_bytes()
        self.times_ms: dict[str, list[float]] = {}

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Time the body of the ``with`` statement as one call of ``name``."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.times_ms.setdefault(name, []).append(1e3 * (time.perf_counter() - start))
            self.most_bytes = max(self.most_bytes, anonymous_bytes() + used_bytes(self._engine))

    def median_ms(self, name: str) -> float:
        """Return the median time of the calls of ``name`` in milliseconds, 0 if there was none."""
        # NumPy's median imports its masked arrays, which take more than 1 MB.
        ordered = sorted(self.times_ms.get(name, [0.0]))
        return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2

    def total_ms(self, name: str) -> float:
        """Return the total time of the calls of ``name`` in milliseconds."""
        return sum(self.times_ms.get(name, [0.0]))

    def last_ms(self, name: str) -> float:
        """Return the time of the last call of ``name`` in milliseconds, 0 if there was none."""
        return self.times_ms.get(name, [0.0])[-1]


@dataclass
class WeightResidency:
    """Account of the units whose weights are in memory, from which tests and profiles read how many are held at once.

    Attributes:
        held: Units whose weights are in memory now.
        most: Largest number of units that were in memory at once.
        downloads: Units of each download, in order.
        elements: Number of entries of all downloaded weights.
    """

    held: set[str] = field(default_factory=set)
    most: int = 0
    downloads: list[tuple[str, ...]] = field(default_factory=list)
    elements: int = 0

    def hold(self, units: Sequence[str], weights: Arrays) -> None:
        """Record that ``weights`` of ``units`` were downloaded and are in memory."""
        self.downloads.append(tuple(units))
        self.held.update(units)
        self.most = max(self.most, len(self.held))
        self.elements += sum(array.size for array in weights.values())

    def drop(self, units: Sequence[str]) -> None:
        """Record that the weights of ``units`` are no longer in memory."""
        self.held.difference_update(units)


class GraphLoader:
    """Loader of a bundle's graphs and of the round's weights.

    Args:
        engine: Engine that runs the graphs.
        manifest: The bundle's table of contents.
        blobs: Source of graphs and weights.
        profiler: Receives the time of each load and of each graph that runs once.
        tuner: Chooses variants of graphs; None runs the graphs' own form.
    """

    def __init__(
        self,
        engine: Engine,
        manifest: Manifest,
        blobs: BlobSource,
        profiler: RoundProfiler,
        tuner: Autotuner | None = None,
    ) -> None:
        self.engine = engine
        self.manifest = manifest
        self.profiler = profiler
        self.residency = WeightResidency()
        self.variants = GraphVariants(engine, blobs, tuner)
        self._blobs = blobs

    def load(self, name: str) -> LoadedGraph:
        """Load graph ``name`` in the variant and with the number of threads that were chosen for this device. Raise
        BundleError if its bytes are damaged or its ports differ.
        """
        spec = self.manifest.graph(name)
        with self.profiler.timed("load"):
            artifact, threads = self.variants.artifact(spec)
            return self.engine.load(spec, artifact, threads)

    def run_once(self, name: str, feeds: Arrays, state: State) -> Outputs:
        """Load graph ``name``, run it once, drop it, and return its outputs. The profiler records the time under
        ``name``.
        """
        graph = self.load(name)
        with self.profiler.timed(name):
            return graph.run(feeds, state)

    def fetch_weights(self, job: Job, units: Sequence[str]) -> Arrays:
        """Return the current weights of ``units``, float32, by their names in the global model. Downloads missing blobs
        and applies patches.

        Raises:
            BundleError: The round announces no weights for a unit.
        """
        lines = {unit: job.line(unit) for unit in units}
        missing = [unit for unit, line in lines.items() if not line]
        if missing:
            raise BundleError(
                f"round {job.round} announces no weights for units {missing}; export the bundle again",
                round=job.round,
                units=missing,
            )
        # One request for all of it: a store that is nearly full must not drop one part to make room for another.
        blobs = iter(self._blobs.get_all([ref for line in lines.values() for ref in line]))
        weights: Arrays = {}
        for line in lines.values():
            # The first blob is whole, in float32 where it travelled in float16; patches follow in order.
            unit_weights = to_float32(tensors.load(next(blobs)))
            for _ in line[1:]:
                unit_weights = apply_patch(unit_weights, next(blobs))
            weights |= unit_weights
        self.residency.hold(units, weights)
        return weights

    def weight_inputs(self, spec: Graph, weights: Arrays) -> Arrays:
        """Return the inputs of ``spec`` with role ``weights``, by port name.

        Raises:
            BundleError: A tensor is missing in ``weights`` or has another shape.
        """
        feeds: Arrays = {}
        for port in spec.inputs_of("weights"):
            if port.label not in weights:
                raise BundleError(
                    f"graph {spec.name!r} wants {port.label!r}, which the round's weights do not hold",
                    graph=spec.name,
                    weight=port.label,
                )
            check_port(port, weights[port.label])
            feeds[port.name] = weights[port.label]
        return feeds


def arrays_of_role(arrays: Arrays, role: str) -> Arrays:
    """Return the arrays named ``<role>.<label>`` by label; others are left out."""
    return {name.partition(".")[2]: array for name, array in arrays.items() if name.partition(".")[0] == role}


def check_port(port: Port, array: Array) -> None:
    """Check that ``array`` has the shape and dtype of ``port``.

    Raises:
        DataError: Shape or dtype differ, and the port is a batch.
        BundleError: Shape or dtype differ, and the port has another role.
    """
    if array.shape != port.shape or array.dtype != np.dtype(port.dtype):
        kind = DataError if port.role == "batch" else BundleError
        raise kind(
            f"{port.name} should be {port.dtype} {port.shape}, found {array.dtype} {array.shape}: "
            "the data or the weights do not belong to this bundle",
            port=port.name,
        )
