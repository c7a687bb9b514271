"""Recorded boundary activations: a file with one row per local sample, tagged with its model version."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from types import TracebackType

import msgspec
import numpy as np

from edgefl.errors import StaleRecordError, StoreError
from edgefl.system.sizes import size
from edgefl.wire.tensors import Array
from edgefl_device.disk import reserve


class _Meta(msgspec.Struct, frozen=True):
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


class Record:
    """Rows of shape ``shape[1:]`` on disk; only rows that are read are ever in memory.

    Read and written, not mapped: of a mapping, pages around each row become part of the process as well.
    """

    def __init__(self, path: Path, meta: _Meta) -> None:
        self.path = path
        self._meta = meta
        self._file: FileIO = path.open("r+b", buffering=0)

    @classmethod
    def create(cls, path: Path, shape: tuple[int, ...], dtype: str, version: str) -> Record:
        """Return an empty record; it counts as written only after :meth:`seal`. StoreError if the disk has no room for
        it."""
        meta = _Meta(version, shape, dtype)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _meta_path(path).unlink(missing_ok=True)
            with path.open("wb") as file:
                reserve(file, meta.nbytes)
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
    def reopen(cls, path: Path, version: str) -> Record:
        """Return the sealed record at ``path``; StaleRecordError if it belongs to another model version or is not whole."""
        try:
            meta = msgspec.msgpack.decode(_meta_path(path).read_bytes(), type=_Meta)
            whole = path.stat().st_size == meta.nbytes
        except (OSError, TypeError, ValueError) as error:  # msgspec's errors are ValueErrors
            raise _not_whole(path) from error
        if not whole:
            raise _not_whole(path)
        meta.check(version)
        return cls(path, meta)

    def check(self, version: str) -> None:
        """Raise StaleRecordError unless the record belongs to ``version``."""
        self._meta.check(version)

    @property
    def shape(self) -> tuple[int, ...]:
        return self._meta.shape

    def write(self, start: int, rows: Array) -> None:
        """Write ``rows`` (n, *shape[1:]) as the record's rows from ``start`` on; StoreError if the disk is full."""
        rest = _bytes_of(np.ascontiguousarray(rows, self._meta.dtype))
        with self._writing():
            self._file.seek(start * self._meta.row_bytes)
            while rest:
                rest = rest[self._file.write(rest) :]

    def seal(self) -> None:
        """Flush the rows, then the tag that makes them valid. StoreError if the disk does not take them."""
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
        """Return copies of the rows at ``indices``; StaleRecordError unless the record is of model ``version``."""
        self.check(version)
        picked: Array = np.empty((len(indices), *self.shape[1:]), self._meta.dtype)
        size, room = self._meta.row_bytes, _bytes_of(picked)
        for place, index in enumerate(indices):
            self._file.seek(int(index) * size)
            self._fill(room[place * size : (place + 1) * size])
        return picked

    def _fill(self, room: memoryview) -> None:
        while room:
            count = self._file.readinto(room)
            if not count:
                raise _not_whole(self.path)  # somebody has cut the file short
            room = room[count:]

    def delete(self) -> None:
        self.close()
        self.path.unlink(missing_ok=True)
        _meta_path(self.path).unlink(missing_ok=True)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Record:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _bytes_of(array: Array) -> memoryview:
    """Return the memory of a contiguous array, byte by byte."""
    return array.reshape(-1).view(np.uint8).data


def _not_whole(path: Path) -> StaleRecordError:
    return StaleRecordError(f"there is no whole record at {path.name}; run the forward pass again")


def _meta_path(path: Path) -> Path:
    return path.with_suffix(".meta")
