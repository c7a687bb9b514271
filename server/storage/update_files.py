"""The bytes of accepted updates, beside the journal that says where they lie: a file for each open round, appended to."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from edgefl.system.files import make_folder, sync_folder
from edgefl.wire.errors import StoreError

_PATTERN = "round-*.bin"


@dataclass(frozen=True, slots=True)
class Place:
    """Where the bytes of an update lie in its round's file."""

    offset: int
    size: int


class UpdateFiles:
    """The files in ``folder``. A round's file goes when the round is over: the disk holds what is open, and no more."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def append(self, number: int, updates: Sequence[bytes]) -> list[Place]:
        """Add updates of round ``number``, all on disk before this returns; StoreError if they are not.

        What a journal never came to name, of a process that was killed, lies between them and is read by nobody.
        """
        with self._guard():
            path = self._path(number)
            new = not path.exists()
            if new:
                make_folder(self._folder)
            with path.open("ab") as file:
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
        places = []
        for data in updates:
            places.append(Place(begin, len(data)))
            begin += len(data)
        return places

    def read(self, number: int, place: Place) -> bytes:
        """The bytes that lie there; StoreError if they are not all there."""
        if not self._path(number).is_file():
            raise StoreError(
                f"the updates of round {number} are not in {self._folder}: the bytes of rounds that are over are kept where "
                "round.keep_updates is true before the run begins",
                round=number,
            )
        with self._guard(), self._path(number).open("rb") as file:
            file.seek(place.offset)
            data = file.read(place.size)
        if len(data) != place.size:
            raise StoreError(
                f"{self._path(number)} ends in the midst of an update that was accepted: restore the file, or start over in "
                "another folder"
            )
        return data

    def drop(self, *, but: int | None = None) -> None:
        """Delete the files of all rounds ``but`` one. What cannot be deleted stays until the next time."""
        kept = None if but is None else self._path(but)
        for path in self._folder.glob(_PATTERN):
            if path != kept:
                with suppress(OSError):
                    path.unlink()

    def _path(self, number: int) -> Path:
        return self._folder / f"round-{number:08d}.bin"

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
