"""Append-only storage of rows: in memory while they are few, else in an unnamed mapped file."""

from __future__ import annotations

import errno
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import numpy as np

from edgefl.errors import ConfigError, DataError
from edgefl.wire import folders
from edgefl.wire.tensors import Array

IN_MEMORY = 16 << 20
"""Bytes of one spool that stay in memory."""


class Spool:
    """Append-only array of rows of one ``shape`` and ``dtype``.

    Beyond ``limit`` bytes the rows move to an unnamed file in the user's cache folder. The system deletes the file
    with the last array that maps it.

    Raises:
        DataError: The disk is full (from any method).
    """

    def __init__(self, dtype: str | np.dtype, shape: tuple[int, ...] = (), limit: int | None = None) -> None:
        self.dtype, self.shape = np.dtype(dtype), shape
        self._limit = IN_MEMORY if limit is None else limit
        self._parts: list[Array] = []
        self._file: IO[bytes] | None = None
        self._rows = 0

    def __len__(self) -> int:
        return self._rows

    @property
    def _row_bytes(self) -> int:
        return self.dtype.itemsize * int(np.prod(self.shape, dtype=np.int64))

    def extend(self, rows: Array) -> None:
        """Append ``rows``, of shape (n, *shape) or flat; ``dtype`` must be able to hold their values."""
        part = np.array(rows, self.dtype).reshape(-1, *self.shape)
        self._rows += len(part)
        if self._file is None:
            self._parts.append(part)
            if self._rows * self._row_bytes > self._limit:
                self._to_file()
        else:
            self._write(part)

    def truncate(self, rows: int) -> None:
        """Drop all but the first ``rows`` rows."""
        if self._file is not None:
            with self._room():
                self._file.truncate(rows * self._row_bytes)
                self._file.seek(0, 2)
        else:
            self._parts = [self._join()[:rows]]
        self._rows = rows

    def array(self) -> Array:
        """Return all rows, shape (n, *shape), read-only. Append nothing afterwards."""
        if self._file is None:
            return self._join()
        with self._room():
            self._file.flush()
        if not self._rows:  # an empty file cannot be mapped
            return np.zeros((0, *self.shape), self.dtype)
        return np.asarray(np.memmap(self._file, self.dtype, "r", shape=(self._rows, *self.shape)))

    def _join(self) -> Array:
        empty = np.zeros((0, *self.shape), self.dtype)
        return np.concatenate([empty, *self._parts]) if len(self._parts) != 1 else self._parts[0]

    def _to_file(self) -> None:
        self._file = _file()
        parts, self._parts = self._parts, []
        for part in parts:
            self._write(part)

    def _write(self, part: Array) -> None:
        assert self._file is not None
        with self._room():
            self._file.write(part.data)

    @contextmanager
    def _room(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise DataError(
                f"the local data take {self._rows * self._row_bytes:,} bytes on the disk and more, which is full: free "
                "some, or let XDG_CACHE_HOME name a folder with room"
            ) from error


def _file() -> IO[bytes]:
    """Open an unnamed file in the user's cache folder, else in the system's folder for temporary files. DataError if
    both fail.
    """
    refused: OSError | None = None
    for folder in dict.fromkeys((_folder(), None)):
        try:
            return tempfile.TemporaryFile(prefix="edgefl-", dir=folder)
        except OSError as error:
            refused = refused or error
    raise DataError(
        f"the local data are larger than what is kept in memory, and no file can be made for them ({refused}): let "
        "XDG_CACHE_HOME or TMPDIR name a folder that can be written"
    ) from refused


def _folder() -> Path | None:
    """Return the user's cache folder, created if needed; None if the user has none. Temporary folders may be in memory."""
    with suppress(ConfigError, OSError):
        folder = folders.cache("local data")
        folder.mkdir(parents=True, exist_ok=True)
        return folder
    return None
