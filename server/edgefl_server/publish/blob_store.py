"""Blob storage of the server: in memory, or in a folder that mirrors serve."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Protocol

from edgefl.errors import StoreError
from edgefl.system.files import FolderHeld, FolderLock, make_folder, write_whole
from edgefl.wire.blobs import SHA256, BlobRef, split

_LOCK = "lock"
_READ = 1 << 20


class BlobStore(Protocol):
    """Storage of encoded blobs by their SHA-256, in lower-case hexadecimal digits."""

    def keep(self, sha256: str, data: bytes) -> None:
        """Store a blob. ``sha256`` is the digest of ``data``.

        Raises:
            StoreError: If the blob cannot be written.
        """

    def read(self, sha256: str) -> bytes:
        """Return the bytes of a blob.

        Raises:
            StoreError: If the blob was removed.
        """

    def pieces(self, ref: BlobRef) -> Iterator[bytes]:
        """Yield the chunks of a blob in order, each of ``ref.chunk`` bytes except the last one.

        Raises:
            StoreError: If the blob was removed or is incomplete.
        """

    def keep_only(self, wanted: Collection[str]) -> None:
        """Delete all blobs except those ``wanted`` (SHA-256), including blobs of an earlier process.

        Raises:
            StoreError: If a blob cannot be deleted.
        """

    def close(self) -> None:
        """Release the storage, such as a lock on its folder."""


class MemoryBlobStore:
    """Blob storage in memory, for the lifetime of the process."""

    def __init__(self) -> None:
        self._blobs: dict[str, bytes] = {}

    def keep(self, sha256: str, data: bytes) -> None:
        self._blobs[sha256] = data

    def read(self, sha256: str) -> bytes:
        return self._blobs[sha256]

    def pieces(self, ref: BlobRef) -> Iterator[bytes]:
        return split(self._blobs[ref.sha256], ref.chunk)

    def keep_only(self, wanted: Collection[str]) -> None:
        for sha256 in self._blobs.keys() - wanted:
            del self._blobs[sha256]

    def close(self) -> None:
        self._blobs.clear()


class MirrorFolder:
    """Blob storage in files ``folder/<sha256>``, each complete or absent, for `edgefl mirror` or another file server.

    One server uses the folder at a time, and deletes blobs that it no longer publishes. Files with other names are
    not touched.

    Raises:
        StoreError: If another server uses the folder, or it cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            make_folder(folder)
            self._lock = FolderLock(folder, _LOCK)
        except OSError as error:
            raise self._unusable(error) from error
        except FolderHeld as held:
            raise StoreError(
                f"another server publishes into the mirror's folder {folder} ({held.who}): give each its own "
                "(downlink.mirror_folder)",
                folder=str(folder),
            ) from held

    def keep(self, sha256: str, data: bytes) -> None:
        path = self.folder / sha256
        try:
            # A power cut may leave half a file: nothing here is worth waiting for the disk.
            if not (path.is_file() and path.stat().st_size == len(data) and _digest(path) == sha256):
                write_whole(path, data)
        except OSError as error:
            raise self._unusable(error) from error

    def read(self, sha256: str) -> bytes:
        try:
            return (self.folder / sha256).read_bytes()
        except OSError as error:
            raise self._gone(sha256, error) from error

    def pieces(self, ref: BlobRef) -> Iterator[bytes]:
        try:
            with (self.folder / ref.sha256).open("rb") as file:
                for start in range(0, max(1, ref.size), ref.chunk):
                    piece = file.read(ref.chunk)
                    if len(piece) != min(ref.chunk, ref.size - start):
                        raise OSError(f"it does not have {ref.size} bytes")
                    yield piece
        except OSError as error:
            raise self._gone(ref.sha256, error) from error

    def keep_only(self, wanted: Collection[str]) -> None:
        try:
            for path in self.folder.iterdir():
                if SHA256.fullmatch(path.name) and path.name not in wanted:
                    path.unlink(missing_ok=True)
        except OSError as error:
            raise self._unusable(error) from error

    def close(self) -> None:
        self._lock.release()

    def _unusable(self, error: OSError) -> StoreError:
        reason = error.strerror or str(error)
        return StoreError(
            f"the mirror's folder {self.folder} cannot be written ({reason}): free some space there, or name another one "
            "(downlink.mirror_folder)",
            folder=str(self.folder),
            error=reason,
        )

    def _gone(self, sha256: str, error: OSError) -> StoreError:
        return StoreError(
            f"blob {sha256[:12]} is gone from the mirror's folder {self.folder} ({error.strerror or error}): start the "
            "server again, which writes it anew, and let nobody else clean up there",
            folder=str(self.folder),
            sha256=sha256,
        )


def _digest(path: Path) -> str:
    whole = hashlib.sha256()
    with path.open("rb") as file:
        while data := file.read(_READ):
            whole.update(data)
    return whole.hexdigest()
