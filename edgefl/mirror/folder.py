"""Blobs as files of a folder, each under its SHA-256: nothing else in it is seen, and no link is followed."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from edgefl.errors import MirrorError
from edgefl.wire.blobs import SHA256


class Blob(Protocol):
    """One that can be read, also while it still comes in."""

    @property
    def size(self) -> int | None:
        """Bytes; None while nobody knows."""

    @property
    def failed(self) -> str:
        """Why it will not be whole; empty if it may."""

    @property
    def lacks(self) -> bool:
        """Whether it failed because there is no such blob."""

    def read(self, start: int, nbytes: int) -> bytes:
        """At most so many bytes from ``start``; none while they are not here."""

    def close(self) -> None: ...


class OpenFile:
    """A blob that is here; whoever has it open keeps it, also if it is deleted meanwhile."""

    failed, lacks = "", False

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.size: int | None = os.fstat(descriptor).st_size

    def read(self, start: int, nbytes: int) -> bytes:
        data = os.pread(self._descriptor, nbytes, start)
        self.failed = "" if data else "the file became shorter"
        return data

    def close(self) -> None:
        os.close(self._descriptor)


class BlobFolder:
    """MirrorError if there is no such folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            os.listdir(path)
        except OSError as error:
            raise MirrorError(
                f"the mirror's folder {path} cannot be read ({error.strerror or error}): a server writes it where its "
                "federation has mirrors (`edgefl server`), most often as OUT/mirror",
                folder=str(path),
            ) from error

    def open(self, sha256: str) -> Blob | None:
        """The blob, if it is here: a file, and no link to one."""
        if SHA256.fullmatch(sha256) is None:
            return None
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # a pipe would wait for its writer
        try:
            descriptor = os.open(self.path / sha256, flags)
        except OSError:
            return None
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            return OpenFile(descriptor)
        with suppress(OSError):
            os.close(descriptor)
        return None
