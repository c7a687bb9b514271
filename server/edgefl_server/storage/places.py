"""Locations of a run's journal and of the bytes of its updates."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from edgefl.errors import StoreError
from edgefl_server.storage.update_files import UpdateFiles
from edgefl_server.storage.update_store import UpdateLocation, UpdateStore, places_of

# The bytes of accepted updates as objects, wherever fsspec reaches: one for each group that is journaled.

_PREFIX = "round-"


class UpdateObjects:
    """The objects below ``url``, such as ``s3://bucket/run``. They go when the round is over. ``writer`` is part of their
    names, so that no process writes over another's, also not over those of the one that it takes the place of.

    StoreError where fsspec, or what it needs for such a place, is not installed.
    """

    def __init__(self, url: str, writer: str) -> None:
        self._url = url.rstrip("/")
        self._writer = writer or f"server-{time.time_ns():020d}"
        self._numbers = count()
        with self._guard():
            self._files, self._root = _file_system(self._url)

    def append(self, number: int, updates: Sequence[bytes]) -> list[UpdateLocation]:
        """See :class:`edgefl_server.storage.update_store.UpdateStore`."""
        name = f"{_PREFIX}{number:08d}-{self._writer}-{next(self._numbers):08d}.bin"
        with self._guard():
            self._files.pipe_file(f"{self._root}/{name}", b"".join(updates))
        return places_of(name, 0, updates)

    def read(self, place: UpdateLocation) -> bytes:
        """The bytes that lie there; StoreError if they are not all there."""
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
        """Delete the objects of all rounds and processes."""
        with suppress(StoreError), self._guard():
            self._files.invalidate_cache()
            names = [str(name) for name in self._files.find(self._root)]
            old = [name for name in names if name.rpartition("/")[2].startswith(_PREFIX)]
            if old:
                self._files.rm(old)

    @contextmanager
    def _guard(self) -> Iterator[None]:
        """Each file system has errors of its own, and some have those of their libraries."""
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
    """The URL of a journal that is a file, whatever its folder is called."""
    return sa.URL.create("sqlite", database=str(path)).render_as_string()


def place_of(chosen: str, federation: str, folder: Path) -> str:
    """Return the location for the bytes of a federation's updates.

    It lies below the ``chosen`` location, which federations may share, or, without one, in the ``folder`` of the run.
    """
    return f"{chosen.rstrip('/')}/{federation}" if chosen else str(folder / "updates")


def store_at(place: str, writer: str = "") -> UpdateStore:
    """A folder, of this machine or one that several share, or an fsspec URL. ``writer`` is part of the names of what this
    process writes there. StoreError for a place that cannot be used."""
    if "://" in place and not place.startswith(_FILE):
        return UpdateObjects(place, writer)
    return UpdateFiles(Path(place.removeprefix(_FILE)), writer)
