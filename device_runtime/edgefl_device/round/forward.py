"""Multi-step forward pass: the frozen prefix, chunk by chunk, into a record on disk."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from edgefl.errors import BundleError, StaleRecordError
from edgefl.wire.bundle.manifest import Graph, Manifest, Port
from edgefl.wire.tensors import Array
from edgefl_device.data.samples import FittedData
from edgefl_device.memory import trim_memory
from edgefl_device.round.costs import Profiler
from edgefl_device.round.feeds import other_rows
from edgefl_device.round.graphs import Graphs, GraphSettings, Step
from edgefl_device.round.job import Job
from edgefl_device.round.record import Record

Source = FittedData | Record


def record_tag(job: Job) -> str:
    """What a record belongs to: the run, the model as it was put together, the bundle (which cuts it) and the rows."""
    model = f"model {job.model_version} as {job.weights}"
    return f"run {job.run}, {model}, bundle {job.bundle.sha256}, samples {job.samples}"


class MultiStepForward:
    """Runs the chunks of a manifest's prefix over the local data, once per round."""

    def __init__(
        self, graphs: Graphs, manifest: Manifest, profiler: Profiler, settings: GraphSettings
    ) -> None:
        self._graphs = graphs
        self._manifest = manifest
        self._profiler = profiler
        self._settings = settings

    def record(self, job: Job, data: FittedData) -> Record:
        """The boundary activations, one row per sample. Chunks whose record is sealed already are not run again."""
        first, source = self._sealed(job, data)
        for index in range(first, len(self._manifest.prefix)):
            following = self._chunk(index, job, source, data)
            if isinstance(source, Record):
                source.delete()
            source = following
        if not isinstance(source, Record):
            raise BundleError("a manifest without a prefix has no record; this is a fault of the runtime")
        return source

    def _sealed(self, job: Job, data: FittedData) -> tuple[int, Source]:
        for index in reversed(range(len(self._manifest.prefix))):
            try:
                record = Record.reopen(self._settings.folder / f"record-{index}.bin", record_tag(job))
            except StaleRecordError:
                continue
            if record.shape[0] == len(data):
                return index + 1, record
            record.close()  # the local data have changed since
        return 0, data

    def _chunk(self, index: int, job: Job, source: Source, data: FittedData) -> Record:
        """Fetch one chunk's units, run them over all rows in fixed groups, drop them.

        The last group is filled by wrap-around, so that batch statistics (static BN) are those of a full group.
        """
        chunk, rows = self._manifest.prefix[index], len(data)
        spec = self._manifest.graph(chunk.graph)
        out = _only(spec.outputs_of("record"), chunk.graph)
        port, others = _read_by(spec)
        feeds = self._graphs.weight_feeds(spec, self._graphs.fetch(job, chunk.units))
        graph = self._graphs.load(chunk.graph)
        path = self._settings.folder / f"record-{index}.bin"
        shape = (rows, *out.shape[1:])
        path.unlink(missing_ok=True)
        self._settings.room(math.prod(shape) * np.dtype(out.dtype).itemsize)
        with self._profiler.timed("write"):
            record = Record.create(path, shape, out.dtype, record_tag(job))
        group = port.shape[0]
        for start in range(0, rows, group):
            self._settings.check_aborted()
            indices = np.arange(start, start + group) % rows
            with self._profiler.timed("forward"):
                batch = {each.name: other_rows(data, each, indices) for each in others}
                batch[port.name] = _rows(source, indices, job)
                result = graph.run(feeds | batch, {}).arrays[out.name]
            self._settings.worked(self._profiler.last_ms("forward"))
            with self._profiler.timed("write"):
                record.write(start, result[: min(group, rows - start)])
            self._settings.watch(
                Step(f"forward {index + 1}", min(start + group, rows), rows, float("nan"), 0.0)
            )
        with self._profiler.timed("write"):
            record.seal()
        del feeds, graph
        self._graphs.residency.drop(chunk.units)
        trim_memory()
        return record


def _rows(source: Source, indices: Array, job: Job) -> Array:
    return source.rows(indices, record_tag(job)) if isinstance(source, Record) else source.rows(indices)


def _read_by(chunk: Graph) -> tuple[Port, list[Port]]:
    """What a chunk reads of a row that flows through all of them, and what it reads beside it."""
    ports = chunk.inputs_of("batch")
    flowing = _only([port for port in ports if port.label == "0.x"], chunk.name)
    return flowing, [port for port in ports if port is not flowing]


def _only(ports: Sequence[Port], graph: str) -> Port:
    if len(ports) != 1:
        raise BundleError(
            f"graph {graph!r} should have one tensor in and one out, found {len(ports)}; export it again"
        )
    return ports[0]
