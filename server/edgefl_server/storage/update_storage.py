"""Storage of the bytes of accepted updates, in files of a folder or in objects of a store. The journal holds their
locations.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Protocol

import sqlalchemy as sa

from edgefl.errors import StoreError
from edgefl.system.files import make_folder, private_opener, sync_folder


@dataclass(frozen=True, slots=True)
class UpdateLocation:
    """Location of an update's bytes: file (or object) name, offset and size."""

    file: str
    offset: int
    size: int


class UpdateStore(Protocol):
    """Storage of the bytes of accepted updates. Several processes may write at once, each under file names of its own."""

    def append(self, number: int, updates: Sequence[bytes]) -> list[UpdateLocation]:
        """Store the updates of round ``number``, durable before this returns, and return the location of each, in
        order.

        If the process is killed before the journal names them, the bytes are never read.

        Raises:
            StoreError: If the updates cannot be written.
        """

    def read(self, place: UpdateLocation) -> bytes:
        """Return the bytes at a location.

        Raises:
            StoreError: If the bytes are missing or incomplete.
        """

    def drop(self) -> None:
        """Delete the updates of all rounds and processes. Failures are ignored; the next call tries again."""


def places_of(file: str, begin: int, updates: Sequence[bytes]) -> list[UpdateLocation]:
    """Return the locations of consecutive updates in one file, the first at offset ``begin``."""
    places = []
    for data in updates:
        places.append(UpdateLocation(file, begin, len(data)))
        begin += len(data)
    return places


_PATTERN = "round-*.bin"


class UpdateFiles:
    """Update storage in files of ``folder``, one file per round and writer.

    ``writer`` is part of the file names, because a process that appends must know the file's length.
    """

    def __init__(self, folder: Path, writer: str = "") -> None:
        self._folder = folder
        self._suffix = f"-{writer}" if writer else ""

    def append(self, number: int, updates: Sequence[bytes]) -> list[UpdateLocation]:
        with self._guard():
            path = self._folder / f"round-{number:08d}{self._suffix}.bin"
            new = not path.exists()
            if new:
                make_folder(self._folder, private=True)
            with open(path, "ab", opener=private_opener) as file:
                begin = file.tell()
                try:
                    file.writelines(updates)
                    file.flush()
                    os.fsync(file.fileno())
                except OSError:
                    with suppress(OSError):
                        os.ftruncate(file.fileno(), begin)
                    raise
            if new:
                sync_folder(self._folder)
        return places_of(path.name, begin, updates)

    def read(self, place: UpdateLocation) -> bytes:
        path = self._folder / place.file
        if not path.is_file():
            raise StoreError(
                f"{path} is not there: the updates of rounds that are over are kept where round.keep_updates is true before "
                "the run begins",
                path=str(path),
            )
        with self._guard(), path.open("rb") as file:
            file.seek(place.offset)
            data = file.read(place.size)
        if len(data) != place.size:
            raise StoreError(
                f"{path} ends in the midst of an update that was accepted: restore the file, or start over in "
                "another folder",
                path=str(path),
                size=place.size,
            )
        return data

    def drop(self) -> None:
        for path in self._folder.glob(_PATTERN):
            with suppress(OSError):
                path.unlink()

    @contextmanager
    def _guard(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StoreError(
                f"the updates in {self._folder} cannot be kept: {error.strerror or error}; free some space or choose "
                "another folder",
                path=str(self._folder),
            ) from error


# The bytes of accepted updates as objects, wherever fsspec reaches: one for each group that is journaled.

_PREFIX = "round-"


class UpdateObjects:
    """Update storage in objects below ``url``, such as ``s3://bucket/run``, accessed by fsspec.

    ``writer`` is part of the object names, so that no process overwrites objects of another one. If it is empty, a unique
    name is chosen.

    Raises:
        StoreError: If fsspec or its driver for this URL is not installed, or the URL cannot be opened.
    """

    def __init__(self, url: str, writer: str) -> None:
        self._url = url.rstrip("/")
        self._writer = writer or f"server-{time.time_ns():020d}"
        self._numbers = count()
        with self._guard():
            self._files, self._root = _file_system(self._url)

    def append(self, number: int, updates: Sequence[bytes]) -> list[UpdateLocation]:
        name = f"{_PREFIX}{number:08d}-{self._writer}-{next(self._numbers):08d}.bin"
        with self._guard():
            self._files.pipe_file(f"{self._root}/{name}", b"".join(updates))
        return places_of(name, 0, updates)

    def read(self, place: UpdateLocation) -> bytes:
        data = b""
        if place.size:  # no store returns an empty range
            begin, end = place.offset, place.offset + place.size
            with self._guard():
                data = bytes(self._files.cat_file(f"{self._root}/{place.file}", start=begin, end=end))
        if len(data) != place.size:
            raise StoreError(
                f"{self._url}/{place.file} ends in the midst of an update that was accepted: restore the object, or start "
                "over in another place"
            )
        return data

    def drop(self) -> None:
        with suppress(StoreError), self._guard():
            self._files.invalidate_cache()
            names = [str(name) for name in self._files.find(self._root)]
            old = [name for name in names if name.rpartition("/")[2].startswith(_PREFIX)]
            if old:
                self._files.rm(old)

    @contextmanager
    def _guard(self) -> Iterator[None]:
        """Context that turns any exception in its block into a StoreError."""
        try:
            yield
        except StoreError:
            raise
        except Exception as error:
            what = " ".join(f"{type(error).__name__}: {error}".split())
            raise StoreError(
                f"the updates at {self._url} cannot be kept: {what}; mend that place or the link to it, or choose another",
                url=self._url,
            ) from error


def _file_system(url: str) -> tuple[Any, str]:
    try:
        from fsspec.core import url_to_fs

        files, root = url_to_fs(url)
    except ImportError as error:
        raise StoreError(
            f"updates are to lie at {url}, and {error}: `pip install edgefl-tiers[objects]`, or name a folder"
        ) from error
    return files, str(root).rstrip("/")


_FILE = "file://"


def journal_at(path: Path) -> str:
    """Return the SQLite URL of the journal file ``path``. Special characters are escaped."""
    return sa.URL.create("sqlite", database=str(path)).render_as_string()


def place_of(chosen: str, federation: str, folder: Path) -> str:
    """Return the location for the bytes of a federation's updates.

    It is ``chosen/federation``, because federations may share ``chosen``, or ``updates`` in the run's ``folder`` if
    ``chosen`` is empty.
    """
    return f"{chosen.rstrip('/')}/{federation}" if chosen else str(folder / "updates")


def store_at(place: str, writer: str = "") -> UpdateStore:
    """Return the update storage at ``place``: a folder, or an fsspec URL.

    ``writer`` is part of this process's file names.

    Raises:
        StoreError: If the location cannot be used.
    """
    if "://" in place and not place.startswith(_FILE):
        return UpdateObjects(place, writer)
    return UpdateFiles(Path(place.removeprefix(_FILE)), writer)
