"""Compiled bundles of this user, by the digest of what they were made from: a folder that all processes share.

One file for each bundle, ``<digest>.efl``, which any command for bundles reads. A damaged file counts as none. Where the
folder grows beyond its limit, the bundles that were longest not used go. Imports no torch::

    cache = BundleCache.of_user()
    found = cache.bundle(digest, lambda: compiled(order))
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from edgefl.errors import BundleError
from edgefl.system.files import PARTIAL, write_whole
from edgefl.system.sizes import GIB, size
from edgefl.wire import folders
from edgefl.wire.bundle.archive import Bundle, file_of, read_bundle, read_manifest
from edgefl.wire.bundle.manifest import Manifest

FOLDER = "EDGEFL_CACHE"
"""Environment variable that names another folder."""
LIMIT = 2 * GIB
_SUFFIX = ".efl"
_ABANDONED_S = 3600.0
"""A part of a file that nobody has written to for this long belongs to a process that was killed."""


@dataclass(frozen=True)
class Found:
    """A bundle, and whether it was ``compiled`` just now or came out of the cache."""

    bundle: Bundle
    compiled: bool


@dataclass(frozen=True)
class Entry:
    """A file of the cache. ``used`` is when, in seconds since 1970; ``manifest`` is None for a damaged one."""

    path: Path
    nbytes: int
    used: float
    manifest: Manifest | None


@dataclass(frozen=True)
class BundleCache:
    """The bundles in ``folder``, which take ``limit`` bytes at most (or one bundle, if that is larger)."""

    folder: Path
    limit: int = LIMIT

    @classmethod
    def of_user(cls) -> BundleCache:
        """In the folder that ``EDGEFL_CACHE`` names, else in ``edgefl/bundles`` below the user's folder for caches.
        ConfigError where this user has no home, and nothing names a folder."""
        if own := os.environ.get(FOLDER):
            return cls(Path(own))
        return cls(folders.cache("compiled bundles", f"{FOLDER} to a folder") / "bundles")

    def bundle(self, digest: str, make: Callable[[], Bundle]) -> Found:
        """The bundle of this digest, made and kept where there is none. What cannot be kept is made all the same."""
        bundle = self.find(digest)
        if bundle is not None:
            return Found(bundle, compiled=False)
        bundle = make()
        with suppress(OSError):  # a full disk, or a home that nobody may write to
            self.keep(digest, bundle)
        return Found(bundle, compiled=True)

    def find(self, digest: str) -> Bundle | None:
        """The bundle of this digest, which counts as used now; None if there is none, or only a damaged one."""
        path = self._path(digest)
        try:
            bundle = read_bundle(path)
        except (BundleError, OSError):
            return None
        with suppress(OSError):  # removed meanwhile, or another user's
            os.utime(path)
        return bundle

    def keep(self, digest: str, bundle: Bundle) -> None:
        """Put a bundle there, and remove those that were longest not used if that is too much. OSError if it cannot be
        written."""
        path = self._path(digest)
        self.folder.mkdir(parents=True, exist_ok=True)
        write_whole(path, file_of(bundle), shared=True)
        total = 0
        for other, nbytes, _ in self._files():
            total += nbytes
            if total > self.limit and other != path:
                with suppress(OSError):
                    other.unlink()
        self._remove_abandoned()

    def entries(self) -> list[Entry]:
        """What there is, the last used first."""
        return [Entry(path, nbytes, used, _manifest(path)) for path, nbytes, used in self._files()]

    @property
    def nbytes(self) -> int:
        """Of all files."""
        return sum(nbytes for _, nbytes, _ in self._files())

    def clear(self) -> int:
        """Remove all bundles; how many there were. OSError if one cannot be removed."""
        paths = [path for path, *_ in self._files()]
        for path in paths:
            path.unlink(missing_ok=True)
        return len(paths)

    def _path(self, digest: str) -> Path:
        return self.folder / f"{digest}{_SUFFIX}"

    def _files(self) -> list[tuple[Path, int, float]]:
        """Path, bytes and time of last use, the last used first."""
        files = []
        for path in self.folder.glob(f"*{_SUFFIX}"):
            with suppress(FileNotFoundError):  # another process removed it
                about = path.stat()
                files.append((path, about.st_size, about.st_mtime))
        return sorted(files, key=lambda file: -file[2])

    def _remove_abandoned(self) -> None:
        for path in self.folder.glob(f"*{PARTIAL}"):
            with suppress(OSError):
                if time.time() - path.stat().st_mtime > _ABANDONED_S:
                    path.unlink()


def _manifest(path: Path) -> Manifest | None:
    try:
        return read_manifest(path)
    except (BundleError, OSError):
        return None


def told(*, compiled: int, reused: int, folder: Path, nbytes: int) -> str:
    """For people: how many bundles came from the cache, where that is, and its size."""
    counts = [f"{reused} from the cache"] * bool(reused) + [f"{compiled} compiled"] * bool(compiled)
    return f"bundles: {', '.join(counts) or 'none'} ({short(folder)}, {size(nbytes)})"


def short(path: Path) -> str:
    """A path below the user's home with a ``~`` for it."""
    with suppress(ValueError, RuntimeError):  # elsewhere, or nobody's home
        return f"~/{path.relative_to(Path.home()).as_posix()}"
    return str(path)
