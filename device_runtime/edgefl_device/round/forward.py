"""Multi-step forward pass: the frozen prefix, chunk by chunk, into a record on disk."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from edgefl.errors import BundleError, RoundDeclined, StaleRecordError, StoreError
from edgefl.wire.bundle.manifest import Port
from edgefl.wire.mqtt.messages import TOO_MUCH
from edgefl_device.data.samples import FittedData
from edgefl_device.memory import trim_memory
from edgefl_device.round.control import RoundControl, Step
from edgefl_device.round.graph_loader import GraphLoader, RoundStore
from edgefl_device.round.inputs import other_rows
from edgefl_device.round.job import Job
from edgefl_device.round.record import Record


def record_tag(job: Job) -> str:
    """Return the tag of a record: run, model as it was put together, bundle (which cuts it) and rows."""
    model = f"model {job.model_version} as {job.weights}"
    return f"run {job.run}, {model}, bundle {job.bundle.sha256}, samples {job.samples}"


class MultiStepForward:
    """Runs the chunks of a manifest's prefix over the local data, once per round.

    Args:
        loader: Loader of graphs and weights.
        store: Storage that makes room on the disk for records; None if they are in a temporary folder.
        folder: Folder of the records.
    """

    def __init__(self, loader: GraphLoader, store: RoundStore | None, folder: Path) -> None:
        self._loader = loader
        self._store = store
        self._folder = folder

    def record(self, job: Job, data: FittedData, control: RoundControl) -> Record:
        """Return the boundary activations, one row per sample. Chunks with a sealed record are not run again.

        Raises:
            RoundAborted: The round was cancelled meanwhile.
            RoundDeclined: The disk has no room for the record, or ``control`` ends the round.
            BundleError: Graphs, weights and ports disagree.
        """
        prefix = self._loader.manifest.prefix
        first, source = self._sealed(job, data)
        for index in range(first, len(prefix)):
            following = self._run_chunk(index, job, source, data, control)
            if isinstance(source, Record):
                source.delete()
            source = following
        if not isinstance(source, Record):
            raise BundleError("a manifest without a prefix has no record; this is a fault of the runtime")
        return source

    def _sealed(self, job: Job, data: FittedData) -> tuple[int, FittedData | Record]:
        """Return the first chunk to run and its source: the last sealed record, or the samples."""
        for index in reversed(range(len(self._loader.manifest.prefix))):
            try:
                record = Record.reopen(self._folder / f"record-{index}.bin", record_tag(job))
            except StaleRecordError:
                continue
            if record.shape[0] == len(data):
                return index + 1, record
            record.close()  # the local data have changed since
        return 0, data

    def _run_chunk(
        self, index: int, job: Job, source: FittedData | Record, data: FittedData, control: RoundControl
    ) -> Record:
        """Fetch one chunk's units, run them over all rows in fixed groups, drop them."""
        loader, profiler, rows, tag = self._loader, self._loader.profiler, len(data), record_tag(job)
        chunk = loader.manifest.prefix[index]
        spec = loader.manifest.graph(chunk.graph)
        out = _only(spec.outputs_of("record"), chunk.graph)
        ports = spec.inputs_of("batch")
        flowing = _only([port for port in ports if port.label == "0.x"], chunk.graph)
        others = [port for port in ports if port is not flowing]
        feeds = loader.weight_inputs(spec, loader.fetch_weights(job, chunk.units))
        graph = loader.load(chunk.graph)
        path = self._folder / f"record-{index}.bin"
        shape = (rows, *out.shape[1:])
        path.unlink(missing_ok=True)
        if self._store is not None:
            try:
                self._store.make_room_beside(math.prod(shape) * np.dtype(out.dtype).itemsize)
            except StoreError as error:
                raise RoundDeclined(TOO_MUCH, error.message, **error.details) from error
        with profiler.timed("write"):
            record = Record.create(path, shape, out.dtype, tag)
        group = flowing.shape[0]
        for start in range(0, rows, group):
            control.check()
            # The last group is filled by wrap-around: batch statistics (static BN) need a full group.
            indices = np.arange(start, start + group) % rows
            with profiler.timed("forward"):
                batch = {each.name: other_rows(data, each, indices) for each in others}
                batch[flowing.name] = (
                    source.rows(indices, tag) if isinstance(source, Record) else source.rows(indices)
                )
                result = graph.run(feeds | batch, {}).arrays[out.name]
            control.worked(profiler.last_ms("forward"))
            done = min(start + group, rows)
            with profiler.timed("write"):
                record.write(start, result[: done - start])
            control.report(Step(f"forward {index + 1}", done, rows, float("nan"), 0.0))
        with profiler.timed("write"):
            record.seal()
        del feeds, graph
        loader.residency.drop(chunk.units)
        trim_memory()
        return record


def _only(ports: Sequence[Port], graph: str) -> Port:
    if len(ports) != 1:
        raise BundleError(
            f"graph {graph!r} should have one tensor in and one out, found {len(ports)}; export it again"
        )
    return ports[0]
