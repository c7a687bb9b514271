"""A gateway's cache of another mirror: what it lacks is fetched once, however many ask, and passed on as it comes.

Whoever asks gets bytes before their digest is known, and checks them, as with any mirror. Only what has the right one stays.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from edgefl.errors import MirrorError
from edgefl.mirror.folder import Blob, BlobFolder
from edgefl.system.files import PARTIAL, FolderHeld, FolderLock, make_folder
from edgefl.wire.blobs import SHA256
from edgefl.wire.mirror_client import BlobMissing, MirrorConnection, Watchdog
from edgefl.wire.mirrors import Mirror

_STEP = 128 * 1024
_PATIENCE_S = 10.0
_ATTEMPTS = 3
_MOST_AT_ONCE = 8
_FORGET_S = 10.0
"""How long it is believed that the other mirror has not a blob, or cannot give it: names can be made up."""
_MOST_REMEMBERED = 1000
_LOCK = "lock"


@dataclass(frozen=True)
class Upstream:
    """The mirror that is cached, in ``most_bytes`` at most. ``ca_file``: an authority beside the system's."""

    mirror: Mirror
    most_bytes: int
    ca_file: str = ""


class _Download:
    """A blob that comes in; any number may read along."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.size: int | None = None
        self.here = 0
        self.failed = ""
        self.lacks = False
        self.done = threading.Event()

    def fail(self, why: str, *, lacks: bool = False) -> None:
        self.lacks, self.failed = lacks, why

    def reader(self) -> _Reader:
        return _Reader(self, os.open(self._path, os.O_RDONLY | os.O_CLOEXEC))


class _Reader:
    """One who reads along. The file may get its last name, or be deleted: an open one stays. Without a ``descriptor`` the
    blob could not be had a moment ago."""

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
        nbytes = min(nbytes, self._download.here - start)
        return (
            os.pread(self._descriptor, nbytes, start) if self._descriptor is not None and nbytes > 0 else b""
        )

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)


class Cache:
    """``folder`` as a cache of ``upstream``. It is one process's alone; ``tell`` is told what cannot be fetched.

    MirrorError if another one has it, or it cannot be written.
    """

    def __init__(
        self, folder: Path, upstream: Upstream, tell: Callable[[str], None] = lambda _: None
    ) -> None:
        self._upstream = upstream
        self._tell = tell
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
        """The blob, here or on its way; None if that is none's name, or too many others are on their way."""
        if SHA256.fullmatch(sha256) is None:
            return None
        with self._lock:
            here = self._folder.open(sha256)
            if here is not None:
                self._sizes[sha256] = self._sizes.pop(sha256, here.size or 0)  # the last one to leave
                return here
            refused = self._refused.get(sha256)
            if refused is not None and time.monotonic() < refused[0]:
                return _Reader(refused[1])
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
            self._tell(f"blob {sha256[:12]} of {self._upstream.mirror}: {download.failed}")

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
        """As much as comes in one go, from where the last one ended."""
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
        """Sizes of what an earlier process left whole, the longest unused first; all else of a blob's name goes."""
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
        """Drop the longest unused until ``nbytes`` more fit, that download's from now on; MirrorError if they never do."""
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
