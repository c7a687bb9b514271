"""Multi-step forward pass: runs the frozen prefix, chunk by chunk, and stores its activations on disk (the record)."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from types import TracebackType

import msgspec
import numpy as np

from edgefl.errors import BundleError, RoundDeclined, StaleRecordError, StoreError
from edgefl.system.files import reserve_room
from edgefl.system.sizes import size
from edgefl.wire.bundle.manifest import Port
from edgefl.wire.mqtt.messages import TOO_MUCH
from edgefl.wire.tensors import Array
from edgefl_device.data.samples import FittedData
from edgefl_device.host import trim_memory
from edgefl_device.round.control import RoundControl, StepProgress
from edgefl_device.round.graph_loader import GraphLoader, RoundStore
from edgefl_device.round.inputs import other_rows
from edgefl_device.round.job import Job


def record_tag(job: Job) -> str:
    """Return the text that identifies the content of a record (stored activations): run, model version and weights,
    bundle, and number of rows.
    """
    model = f"model {job.model_version} as {job.weights}"
    return f"run {job.run}, {model}, bundle {job.bundle.sha256}, samples {job.samples}"


class MultiStepForward:
    """Multi-step forward pass: runs the frozen units of a tier (the manifest's prefix), one chunk after the other, once
    per round.

    Args:
        loader: Loader of graphs and weights.
        store: Storage that makes room on the disk for records; None if they are in a temporary folder.
        folder: Folder of the records, which hold the output activations of a chunk for all samples.
    """

    def __init__(self, loader: GraphLoader, store: RoundStore | None, folder: Path) -> None:
        self._loader = loader
        self._store = store
        self._folder = folder

    def record(self, job: Job, data: FittedData, control: RoundControl) -> ActivationRecord:
        """Run the frozen units over all samples, and return the record (activations on disk) of the last chunk, one row
        per sample.

        Chunks with a complete record from before a restart are skipped.

        Raises:
            RoundAborted: The round was cancelled meanwhile.
            RoundDeclined: The disk has no room for the record, or ``control`` ends the round.
            BundleError: Graphs, weights and ports disagree.
        """
        prefix = self._loader.manifest.prefix
        first, source = self._find_sealed(job, data)
        for index in range(first, len(prefix)):
            following = self._run_chunk(index, job, source, data, control)
            if isinstance(source, ActivationRecord):
                source.delete()
            source = following
        if not isinstance(source, ActivationRecord):
            raise BundleError("a manifest without a prefix has no record; this is a fault of the runtime")
        return source

    def _find_sealed(self, job: Job, data: FittedData) -> tuple[int, FittedData | ActivationRecord]:
        """Return (index of the first chunk to run, its input).

        The input is the last complete record (activations on disk) of an earlier process, or the samples if there is none.
        """
        for index in reversed(range(len(self._loader.manifest.prefix))):
            try:
                record = ActivationRecord.reopen(self._folder / f"record-{index}.bin", record_tag(job))
            except StaleRecordError:
                continue
            if record.shape[0] == len(data):
                return index + 1, record
            record.close()  # the local data have changed since
        return 0, data

    def _run_chunk(
        self,
        index: int,
        job: Job,
        source: FittedData | ActivationRecord,
        data: FittedData,
        control: RoundControl,
    ) -> ActivationRecord:
        """Run one chunk of the frozen units over all rows in groups of fixed size, and return the record of its
        outputs on disk.

        The chunk's weights are downloaded, and dropped afterwards.

        Args:
            index: Number of the chunk.
            job: The task, and the blobs of the weights.
            source: Input of the chunk: the record of the chunk before it, or the samples.
            data: The samples, which also have the further inputs.
            control: Ends the round, and receives finished rows.
        """
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
            record = ActivationRecord.create(path, shape, out.dtype, tag)
        group = flowing.shape[0]
        for start in range(0, rows, group):
            control.check()
            # The last group is filled by wrap-around: batch statistics (static BN) need a full group.
            indices = np.arange(start, start + group) % rows
            with profiler.timed("forward"):
                batch = {each.name: other_rows(data, each, indices) for each in others}
                batch[flowing.name] = (
                    source.rows(indices, tag)
                    if isinstance(source, ActivationRecord)
                    else source.rows(indices)
                )
                result = graph.run(feeds | batch, {}).arrays[out.name]
            control.worked(profiler.last_ms("forward"))
            done = min(start + group, rows)
            with profiler.timed("write"):
                record.write(start, result[: done - start])
            control.report(StepProgress(f"forward {index + 1}", done, rows, float("nan"), 0.0))
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


class _RecordMeta(msgspec.Struct, frozen=True):
    version: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * np.dtype(self.dtype).itemsize

    @property
    def nbytes(self) -> int:
        return self.shape[0] * self.row_bytes

    def check(self, version: str) -> None:
        if self.version != version:
            raise StaleRecordError(
                f"the record belongs to {self.version}, the round trains {version}: "
                "the frozen units have changed, run the forward pass again",
                recorded=self.version,
                wanted=version,
            )


class ActivationRecord:
    """Activations on disk, rows of shape ``shape[1:]``. Only rows that are read are in memory.

    The file is read and written, not mapped, because pages around each mapped row would also become resident.
    """

    def __init__(self, path: Path, meta: _RecordMeta) -> None:
        self.path = path
        self._meta = meta
        self._file: FileIO = path.open("r+b", buffering=0)

    @classmethod
    def create(cls, path: Path, shape: tuple[int, ...], dtype: str, version: str) -> ActivationRecord:
        """Create an empty record at ``path`` with disk space for all rows. It is valid only after :meth:`seal`.

        Args:
            path: File of the record.
            shape: (samples, *row).
            dtype: Type of the entries.
            version: Text that identifies the content (:func:`record_tag`).

        Raises:
            StoreError: The disk has no room for the record.
        """
        meta = _RecordMeta(version, shape, dtype)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _meta_path(path).unlink(missing_ok=True)
            with path.open("wb") as file:
                reserve_room(file, meta.nbytes)
        except OSError as error:
            with suppress(OSError):
                path.unlink(missing_ok=True)
            raise StoreError(
                f"no room for a record of {size(meta.nbytes)} in {path.parent} ({error.strerror}): "
                "free some space, or put the store elsewhere",
                needed=meta.nbytes,
                folder=str(path.parent),
            ) from error
        return cls(path, meta)

    @classmethod
    def reopen(cls, path: Path, version: str) -> ActivationRecord:
        """Open the sealed record at ``path``.

        Raises:
            StaleRecordError: The record is missing, incomplete, or has another ``version``.
        """
        try:
            meta = msgspec.msgpack.decode(_meta_path(path).read_bytes(), type=_RecordMeta)
            whole = path.stat().st_size == meta.nbytes
        except (OSError, TypeError, ValueError) as error:  # msgspec's errors are ValueErrors
            raise _not_whole(path) from error
        if not whole:
            raise _not_whole(path)
        meta.check(version)
        return cls(path, meta)

    def check(self, version: str) -> None:
        """Raise StaleRecordError unless ``version`` is the text that the record was created with."""
        self._meta.check(version)

    @property
    def shape(self) -> tuple[int, ...]:
        return self._meta.shape

    def write(self, start: int, rows: Array) -> None:
        """Write ``rows``, shape (n, *row), as the rows from number ``start`` on.

        Raises:
            StoreError: The disk is full.
        """
        rest = _bytes_of(np.ascontiguousarray(rows, self._meta.dtype))
        with self._writing():
            self._file.seek(start * self._meta.row_bytes)
            while rest:
                rest = rest[self._file.write(rest) :]

    def seal(self) -> None:
        """Write all rows to disk, then the tag that makes the record valid.

        Raises:
            StoreError: The rows cannot be written.
        """
        with self._writing():
            os.fsync(self._file.fileno())
            _meta_path(self.path).write_bytes(msgspec.msgpack.encode(self._meta))

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StoreError(
                f"the record {self.path} cannot be written ({error.strerror}): free some space, or put the store elsewhere",
                path=str(self.path),
            ) from error

    def rows(self, indices: Array, version: str) -> Array:
        """Return copies of the rows at ``indices``.

        Raises:
            StaleRecordError: The record has another ``version``.
        """
        self.check(version)
        picked: Array = np.empty((len(indices), *self.shape[1:]), self._meta.dtype)
        size, room = self._meta.row_bytes, _bytes_of(picked)
        for place, index in enumerate(indices):
            self._file.seek(int(index) * size)
            rest = room[place * size : (place + 1) * size]
            while rest:
                count = self._file.readinto(rest)
                if not count:
                    raise _not_whole(self.path)  # somebody has cut the file short
                rest = rest[count:]
        return picked

    def delete(self) -> None:
        self.close()
        self.path.unlink(missing_ok=True)
        _meta_path(self.path).unlink(missing_ok=True)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> ActivationRecord:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _bytes_of(array: Array) -> memoryview:
    """Return the memory of a contiguous array as a view of bytes."""
    return array.reshape(-1).view(np.uint8).data


def _not_whole(path: Path) -> StaleRecordError:
    return StaleRecordError(
        f"there is no whole record at {path.name}; run the forward pass again", record=path.name
    )


def _meta_path(path: Path) -> Path:
    return path.with_suffix(".meta")
