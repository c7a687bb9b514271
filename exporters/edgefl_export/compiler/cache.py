"""Cache of compiled bundles: a folder of the user's that all processes share. Imports no torch.

One file for each bundle, ``<digest>.efl``, by the digest of its request, which any command for bundles reads. A damaged file
counts as none. If the folder grows beyond its limit, the least recently used bundles are removed::

    cache = BundleCache.of_user()
    bundle = cache.find(digest)
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from edgefl.errors import BundleError
from edgefl.system.files import PARTIAL, write_whole
from edgefl.system.sizes import GIB, size
from edgefl.wire import folders
from edgefl.wire.bundle.archive import BundleArchive, encode_bundle, read_bundle, read_manifest
from edgefl.wire.bundle.manifest import Manifest

FOLDER = "EDGEFL_CACHE"
"""Environment variable that names another folder."""
LIMIT = 2 * GIB
_SUFFIX = ".efl"
_ABANDONED_S = 3600.0
"""Age in seconds after which a partly written file is taken to be left by a killed process."""


@dataclass(frozen=True)
class CompiledBundle:
    """Result of compiling: the bundle, and ``from_cache``, true if it was read from the cache."""

    bundle: BundleArchive
    from_cache: bool


@dataclass(frozen=True)
class CacheEntry:
    """File of the bundle cache.

    Attributes:
        path: path of the file.
        nbytes: size of the file in bytes.
        used: time of last use, in seconds since 1970.
        manifest: manifest of the bundle; None if the file is damaged.
    """

    path: Path
    nbytes: int
    used: float
    manifest: Manifest | None


@dataclass(frozen=True)
class BundleCache:
    """Cache of compiled bundles in ``folder``. It holds at most ``limit`` bytes, or one bundle if that is larger."""

    folder: Path
    limit: int = LIMIT

    @classmethod
    def of_user(cls) -> BundleCache:
        """Return the cache in the folder that ``EDGEFL_CACHE`` names, or in ``edgefl/bundles`` below the user's cache
        folder.

        Raises:
            ConfigError: if the user has no home folder and ``EDGEFL_CACHE`` is not set.
        """
        if own := os.environ.get(FOLDER):
            return cls(Path(own))
        return cls(folders.cache("compiled bundles", f"{FOLDER} to a folder") / "bundles")

    def find(self, digest: str) -> BundleArchive | None:
        """Return the bundle of this request digest and set its time of last use. Return None if it is absent or damaged."""
        path = self._path(digest)
        try:
            bundle = read_bundle(path)
        except (BundleError, OSError):
            return None
        with suppress(OSError):  # removed meanwhile, or another user's
            os.utime(path)
        return bundle

    def keep(self, digest: str, bundle: BundleArchive) -> None:
        """Write the bundle of a request digest, then remove the least recently used bundles beyond the limit.

        Errors of the file system, such as a full disk or a read-only folder, are ignored.
        """
        path = self._path(digest)
        with suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            write_whole(path, encode_bundle(bundle), shared=True)
            total = 0
            for other, nbytes, _ in self._files():
                total += nbytes
                if total > self.limit and other != path:
                    with suppress(OSError):
                        other.unlink()
            self._remove_abandoned()

    def entries(self) -> list[CacheEntry]:
        """Return an entry for each file, the most recently used first."""
        return [CacheEntry(path, nbytes, used, _manifest(path)) for path, nbytes, used in self._files()]

    @property
    def nbytes(self) -> int:
        """Total size of all files in bytes."""
        return sum(nbytes for _, nbytes, _ in self._files())

    def clear(self) -> int:
        """Remove all bundles and return their number; OSError if one cannot be removed."""
        paths = [path for path, *_ in self._files()]
        for path in paths:
            path.unlink(missing_ok=True)
        return len(paths)

    def _path(self, digest: str) -> Path:
        return self.folder / f"{digest}{_SUFFIX}"

    def _files(self) -> list[tuple[Path, int, float]]:
        """Return (path, size in bytes, time of last use in seconds) of each file, the most recently used first."""
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


def cache_summary(*, compiled: int, reused: int, folder: Path, nbytes: int) -> str:
    """Return a line of text about compiled and reused bundles, for the command line.

    Args:
        compiled: number of bundles that were compiled.
        reused: number of bundles that came from the cache.
        folder: folder of the cache.
        nbytes: size of the cache in bytes.
    """
    counts = [f"{reused} from the cache"] * bool(reused) + [f"{compiled} compiled"] * bool(compiled)
    return f"bundles: {', '.join(counts) or 'none'} ({short_path(folder)}, {size(nbytes)})"


def short_path(path: Path) -> str:
    """Return ``path`` as text, with ``~`` for the user's home folder if it lies below that."""
    with suppress(ValueError, RuntimeError):  # elsewhere, or without a home
        return f"~/{path.relative_to(Path.home()).as_posix()}"
    return str(path)


def bundle_name(tier: str, exchange: str = "", format: str = "onnx") -> str:
    """Return a file name ``<tier>[.<exchange>][.<format>].efl``. The format is left out if it is ``onnx``.

    ``exchange`` is the name of the algorithm's round trip, empty for the main one.
    """
    words = (tier, exchange, "" if format == "onnx" else format, "efl")
    return ".".join(word for word in words if word)


SOURCES = (
    "edgefl_export",
    *(f"edgefl/{room}" for room in ("algorithms", "codecs", "contract", "errors.py", "losses.py", "models")),
    *(
        f"edgefl/{room}"
        for room in ("objective", "optimizers", "submodels", "facts", "config", "data", "system", "wire")
    ),
)
"""Folders and files whose code can decide the bytes of a bundle: all that the compiler and the catalogs of models,
submodels, algorithms and codecs import. A test compares them with the imports."""


def source_digest(packages: Mapping[str, Path] | None = None) -> str:
    """Return the SHA-256 of the source files that can decide a bundle (:data:`SOURCES`), as hexadecimal text.

    An edited source tree therefore compiles its bundles again, even at the same version.

    Args:
        packages: folders of ``edgefl`` and ``edgefl_export``; by default those that are imported here.
    """
    if packages is None:
        packages = {name: _folder(name) for name in ("edgefl", "edgefl_export")}
    total = hashlib.sha256()
    for name in SOURCES:
        package, _, room = name.partition("/")
        root = packages[package] / room
        for path in [root] if root.suffix else sorted(root.rglob("*.py")):
            place = path.relative_to(packages[package]).as_posix()
            total.update(f"{package}/{place}\n{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return total.hexdigest()


def _folder(package: str) -> Path:
    spec = find_spec(package)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent
