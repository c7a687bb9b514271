"""Folders of blobs, each a file named by its SHA-256, and a gateway's cache of another mirror.

A cache fetches a missing blob once for all readers and passes its bytes on as they arrive. Readers therefore get bytes of an
unknown digest and check them, as with any mirror; the cache keeps only blobs with the right digest.
"""

from __future__ import annotations

import hashlib
import os
import stat
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from edgefl.errors import MirrorError, not_on_windows
from edgefl.system.files import PARTIAL, FolderHeld, FolderLock, make_folder
from edgefl.wire.blobs import SHA256
from edgefl.wire.mirror_client import BlobMissing, MirrorConnection, Watchdog
from edgefl.wire.mirrors import Mirror


class Blob(Protocol):
    """Interface of a readable blob, which may still be incomplete."""

    @property
    def size(self) -> int | None:
        """Size in bytes; None while it is unknown."""

    @property
    def failed(self) -> str:
        """Reason why the blob stays incomplete; empty if it may be completed."""

    @property
    def lacks(self) -> bool:
        """True if the download failed because the upstream mirror does not have the blob."""

    def read(self, start: int, nbytes: int) -> bytes:
        """Return at most ``nbytes`` bytes from offset ``start``. The result is b"" before they arrive, and if reading
        failed (:attr:`failed`).
        """

    def close(self) -> None: ...


class CompleteBlob:
    """A complete blob in an open file. It stays readable until :meth:`close`, even if its file is deleted."""

    failed, lacks = "", False

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.size: int | None = os.fstat(descriptor).st_size

    def read(self, start: int, nbytes: int) -> bytes:
        if sys.platform == "win32":
            raise not_on_windows("a mirror")
        data = os.pread(self._descriptor, nbytes, start)
        self.failed = "" if data else "the file became shorter"
        return data

    def close(self) -> None:
        os.close(self._descriptor)


class BlobFolder:
    """Folder ``path`` with blobs, each a file named by its SHA-256. Other files and links are ignored.

    Raises:
        MirrorError: if the folder cannot be read.
        ConfigError: on Windows.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if sys.platform == "win32":
            raise not_on_windows("a mirror")
        try:
            os.listdir(path)
        except OSError as error:
            raise MirrorError(
                f"the mirror's folder {path} cannot be read ({error.strerror or error}): a server writes it where its "
                "federation has mirrors (`edgefl server`), most often as OUT/mirror",
                folder=str(path),
            ) from error

    def open(self, sha256: str) -> Blob | None:
        """Open a blob by its SHA-256; None if the folder has no regular file of this name."""
        if SHA256.fullmatch(sha256) is None:
            return None
        if sys.platform == "win32":
            raise not_on_windows("a mirror")
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # a pipe would wait for its writer
        try:
            descriptor = os.open(self.path / sha256, flags)
        except OSError:
            return None
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            return CompleteBlob(descriptor)
        with suppress(OSError):
            os.close(descriptor)
        return None


_STEP = 128 * 1024
_PATIENCE_S = 10.0
_ATTEMPTS = 3
_MOST_AT_ONCE = 8
_FORGET_S = 10.0
"""Time for which a failure of the other mirror is remembered; requested names can be invented."""
_MOST_REMEMBERED = 1000
_LOCK = "lock"


class FailureLog(Protocol):
    """Interface of a log of blobs that could not be fetched; a list of texts is one."""

    def append(self, text: str, /) -> object:
        """Append the reason of a failure."""


@dataclass(frozen=True)
class CacheSettings:
    """Settings of a cache of another mirror.

    Attributes:
        mirror: the mirror that is cached.
        most_bytes: size limit of the cache.
        ca_file: file with an additional certificate authority; "" for none.
    """

    mirror: Mirror
    most_bytes: int
    ca_file: str = ""


class _Download:
    """Blob that is being downloaded into a file, with any number of readers."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.size: int | None = None
        self.here = 0
        self.failed = ""
        self.lacks = False
        self.done = threading.Event()

    def fail(self, why: str, *, lacks: bool = False) -> None:
        self.lacks, self.failed = lacks, why

    def reader(self) -> _DownloadReader:
        if sys.platform == "win32":
            raise not_on_windows("a mirror")
        return _DownloadReader(self, os.open(self._path, os.O_RDONLY | os.O_CLOEXEC))


class _DownloadReader:
    """Reader of a blob that is being downloaded. Its open file survives a rename or deletion.

    If ``descriptor`` is None, the download has failed.
    """

    def __init__(self, download: _Download, descriptor: int | None = None) -> None:
        self._download = download
        self._descriptor = descriptor

    @property
    def size(self) -> int | None:
        return None if self._descriptor is None else self._download.size

    @property
    def failed(self) -> str:
        return self._download.failed

    @property
    def lacks(self) -> bool:
        return self._download.lacks

    def read(self, start: int, nbytes: int) -> bytes:
        if sys.platform == "win32":
            raise not_on_windows("a mirror")
        nbytes = min(nbytes, self._download.here - start)
        return (
            os.pread(self._descriptor, nbytes, start) if self._descriptor is not None and nbytes > 0 else b""
        )

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)


class Cache:
    """Cache of another mirror in a folder, owned by one process.

    Args:
        folder: folder of the blobs.
        upstream: the cached mirror and the size limit.
        log: receives a line for each blob that could not be fetched.

    Raises:
        MirrorError: if another process owns the folder, or it cannot be written.
    """

    def __init__(self, folder: Path, upstream: CacheSettings, log: FailureLog | None = None) -> None:
        self._upstream = upstream
        self._log: FailureLog = log if log is not None else deque(maxlen=1)
        try:
            make_folder(folder)
            self._held = FolderLock(folder, _LOCK)
        except OSError as error:
            raise _unusable(folder, error) from error
        except FolderHeld as held:
            raise MirrorError(
                f"the folder {folder} is in use ({held.who}): a cache needs one of its own",
                folder=str(folder),
            ) from held
        self._folder = BlobFolder(folder)
        self._lock = threading.Lock()
        self._running: dict[str, _Download] = {}
        self._refused: dict[str, tuple[float, _Download]] = {}
        self._sizes = self._found()
        self._make_room(0, None)

    def close(self) -> None:
        self._held.release()

    def open(self, sha256: str) -> Blob | None:
        """Open a blob by its SHA-256. If it is not in the cache, start its download; the returned blob then grows.

        Return None for an invalid name, or if too many other blobs are being fetched. A blob whose download has just
        failed is returned as failed.

        Raises:
            MirrorError: if the folder cannot be written.
        """
        if SHA256.fullmatch(sha256) is None:
            return None
        with self._lock:
            here = self._folder.open(sha256)
            if here is not None:
                self._sizes[sha256] = self._sizes.pop(sha256, here.size or 0)  # the last one to leave
                return here
            refused = self._refused.get(sha256)
            if refused is not None and time.monotonic() < refused[0]:
                return _DownloadReader(refused[1])
            running = self._running.get(sha256) or self._begin(sha256)
            return None if running is None else running.reader()

    def _begin(self, sha256: str) -> _Download | None:
        if len(self._running) >= _MOST_AT_ONCE:
            return None
        path = self._folder.path / f"{sha256}{PARTIAL}"
        download = _Download(path)
        try:
            path.write_bytes(b"")
        except OSError as error:
            raise _unusable(self._folder.path, error) from error
        self._running[sha256] = download
        threading.Thread(
            target=self._fetch, args=(sha256, download, path), name="mirror-fetch", daemon=True
        ).start()
        return download

    # -- a thread for each download --------------------------------------------------------------------------

    def _fetch(self, sha256: str, download: _Download, path: Path) -> None:
        try:
            self._bring(sha256, download, path)
        except MirrorError as error:
            download.fail(error.message, lacks=isinstance(error, BlobMissing))
        except OSError as error:
            download.fail(_unusable(self._folder.path, error).message)
        with self._lock:
            del self._running[sha256]
            if download.failed:
                self._remember(sha256, download)
        if download.failed:
            with suppress(OSError):
                path.unlink(missing_ok=True)
            self._log.append(f"blob {sha256[:12]} of {self._upstream.mirror}: {download.failed}")

    def _remember(self, sha256: str, download: _Download) -> None:
        now = time.monotonic()
        self._refused = {name: entry for name, entry in self._refused.items() if entry[0] > now}
        if len(self._refused) < _MOST_REMEMBERED:
            self._refused[sha256] = now + _FORGET_S, download

    def _bring(self, sha256: str, download: _Download, path: Path) -> None:
        digest, attempts = hashlib.sha256(), 0
        with path.open("wb", buffering=0) as file:
            while download.size is None or download.here < download.size:
                attempts += 1
                try:
                    self._some(sha256, download, file.write, digest.update)
                except BlobMissing:
                    raise
                except MirrorError:
                    if attempts == _ATTEMPTS or download.size is None:
                        raise
        if digest.hexdigest() != sha256:
            raise MirrorError("its bytes have another digest: they are not kept")
        with self._lock:
            path.replace(self._folder.path / sha256)
            self._sizes[sha256] = download.here

    def _some(
        self,
        sha256: str,
        download: _Download,
        write: Callable[[bytes], object],
        update: Callable[[bytes], object],
    ) -> None:
        """Download bytes over one connection, continuing after the last received byte. Pass them to ``write`` and
        ``update``.

        Raises:
            MirrorError: if the connection fails, or the blob does not fit.
        """
        upstream = self._upstream
        with (
            Watchdog() as alarm,
            MirrorConnection(
                upstream.mirror, alarm, patience_s=_PATIENCE_S, near=False, ca_file=upstream.ca_file
            ) as line,
        ):
            if download.size is None:
                size, pieces = line.whole(sha256, _STEP)
                self._make_room(size, download)
            else:
                pieces = line.pieces(
                    sha256, download.size, first=download.here, last=download.size, step=_STEP
                )
            for piece in pieces:
                write(piece)
                update(piece)
                download.here += len(piece)

    # -- what is kept ----------------------------------------------------------------------------------------

    def _found(self) -> dict[str, int]:
        """Delete incomplete blobs in the folder. Return the sizes of the complete ones by name, least recently used
        first.
        """
        found: list[tuple[float, str, int]] = []
        for path in self._folder.path.iterdir():
            name = path.name.removesuffix(PARTIAL)
            if SHA256.fullmatch(name) is None:
                continue
            if name == path.name and _is_whole(path):
                found.append((path.stat().st_mtime, name, path.stat().st_size))
            else:
                path.unlink(missing_ok=True)
        return {name: nbytes for _, name, nbytes in sorted(found)}

    def _make_room(self, nbytes: int, wanted_by: _Download | None) -> None:
        """Delete least recently used blobs until ``nbytes`` more fit, and reserve that many bytes for ``wanted_by``.

        ``wanted_by``: download whose size is then set; None to reserve nothing.

        Raises:
            MirrorError: if the cache cannot free enough.
        """
        most = self._upstream.most_bytes
        with self._lock:
            coming = sum(each.size or 0 for each in self._running.values())
            if nbytes + coming > most:
                raise MirrorError(f"it has {nbytes} bytes, and the cache keeps {most} (`most`)")
            while self._sizes and sum(self._sizes.values()) + coming + nbytes > most:
                oldest = next(iter(self._sizes))
                del self._sizes[oldest]
                (self._folder.path / oldest).unlink(missing_ok=True)
            if wanted_by is not None:
                wanted_by.size = nbytes


def _is_whole(path: Path) -> bool:
    if path.is_symlink() or not path.is_file():
        return False
    whole = hashlib.sha256()
    with path.open("rb") as file:
        while data := file.read(_STEP):
            whole.update(data)
    return whole.hexdigest() == path.name


def _unusable(folder: Path, error: OSError) -> MirrorError:
    return MirrorError(
        f"the cache's folder {folder} cannot be used ({error.strerror or error}): free some space there, or name another "
        "one",
        folder=str(folder),
    )
