"""The bytes of accepted updates in files of a folder: one for each open round and process, appended to."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from edgefl.errors import StoreError
from edgefl.system.files import make_folder, private_opener, sync_folder
from edgefl_server.storage.update_store import UpdateLocation, places_of

_PATTERN = "round-*.bin"


class UpdateFiles:
    """The files in ``folder``. They go when the round is over: the disk holds what is open, and no more.

    ``writer`` is part of their names: two processes that append to one would not know where their bytes lie.
    """

    def __init__(self, folder: Path, writer: str = "") -> None:
        self._folder = folder
        self._suffix = f"-{writer}" if writer else ""

    def append(self, number: int, updates: Sequence[bytes]) -> list[UpdateLocation]:
        """See :class:`edgefl_server.storage.update_store.UpdateStore`."""
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
        """The bytes that lie there; StoreError if they are not all there."""
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
                "another folder"
            )
        return data

    def drop(self) -> None:
        """Delete the files of all rounds and processes."""
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
