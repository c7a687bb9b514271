"""Recorded boundary activations: a memory-mapped file, one row per local sample, tagged with its model version."""

from __future__ import annotations

import errno
import mmap
import os
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO

import msgspec
import numpy as np

from edgefl.wire.errors import StaleRecordError, StoreError
from edgefl.wire.tensors import Array

_PIECE_BYTES = 1 << 20


class _Meta(msgspec.Struct, frozen=True):
    version: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        return int(np.dtype(self.dtype).itemsize * np.prod(self.shape, dtype=np.int64))

    def check(self, version: str) -> None:
        if self.version != version:
            raise StaleRecordError(
                f"the record belongs to {self.version}, the round trains {version}: "
                "the frozen units have changed, run the forward pass again",
                recorded=self.version,
                wanted=version,
            )


class Record:
    """Rows of shape ``shape[1:]`` on disk. Pages are given back after each access, so the record costs no memory."""

    def __init__(self, path: Path, meta: _Meta) -> None:
        self.path = path
        self._meta = meta
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        self._rows: Array = np.frombuffer(self._map, dtype=meta.dtype).reshape(meta.shape)

    @classmethod
    def create(cls, path: Path, shape: tuple[int, ...], dtype: str, version: str) -> Record:
        """An empty record; it counts as written only after :meth:`seal`. StoreError if the disk has no room for it."""
        meta = _Meta(version, shape, dtype)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _meta_path(path).unlink(missing_ok=True)
            with path.open("wb") as file:
                _reserve(file, meta.nbytes)
        except OSError as error:
            with suppress(OSError):
                path.unlink(missing_ok=True)
            raise StoreError(
                f"no room for a record of {meta.nbytes} bytes in {path.parent} ({error.strerror}): "
                "free some space, or put the store elsewhere",
                needed=meta.nbytes,
                folder=str(path.parent),
            ) from error
        return cls(path, meta)

    @classmethod
    def reopen(cls, path: Path, version: str) -> Record:
        """The sealed record at ``path``; StaleRecordError if it belongs to another model version or is not whole."""
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
        """StaleRecordError unless the record belongs to ``version``."""
        self._meta.check(version)

    @property
    def shape(self) -> tuple[int, ...]:
        return self._meta.shape

    def write(self, start: int, rows: Array) -> None:
        self._rows[start : start + len(rows)] = rows
        self._release()

    def seal(self) -> None:
        """Flush the rows, then the tag that makes them valid."""
        self._map.flush()
        _meta_path(self.path).write_bytes(msgspec.msgpack.encode(self._meta))

    def rows(self, indices: Array, version: str) -> Array:
        """Copies of the rows at ``indices``, if the record is of model ``version``."""
        self.check(version)
        picked: Array = self._rows[indices]
        self._release()
        return picked

    def _release(self) -> None:
        if hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)

    def delete(self) -> None:
        self.close()
        self.path.unlink(missing_ok=True)
        _meta_path(self.path).unlink(missing_ok=True)

    def close(self) -> None:
        self._rows = np.empty(0)
        self._map.close()

    def __enter__(self) -> Record:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _reserve(file: IO[bytes], size: int) -> None:
    """Give ``file`` its ``size`` bytes on disk now: a map into a hole of a full disk ends the process."""
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(file.fileno(), 0, size)
            return
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):  # a file system that cannot
                raise
    for start in range(0, size, _PIECE_BYTES):
        file.write(bytes(min(_PIECE_BYTES, size - start)))
    file.flush()
    os.fsync(file.fileno())


def _not_whole(path: Path) -> StaleRecordError:
    return StaleRecordError(f"there is no whole record at {path.name}; run the forward pass again")


def _meta_path(path: Path) -> Path:
    return path.with_suffix(".meta")
