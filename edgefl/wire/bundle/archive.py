"""A bundle as one file: a zip of the manifest and its blobs, each named by digest.

Over MQTT the same manifest and blobs travel one by one, so tiers share graphs that are equal.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from edgefl.system.files import write_whole
from edgefl.wire.blobs import BlobRef, describe, verified
from edgefl.wire.bundle.manifest import Manifest, decode_manifest, encode_manifest
from edgefl.wire.errors import BundleError

MANIFEST_NAME = "manifest.msgpack"
_MANIFEST_LIMIT = 64 << 20  # far beyond any manifest; keeps a zip bomb from filling the memory
_EPOCH = (1980, 1, 1, 0, 0, 0)  # a fixed date: equal bundles are equal files


@dataclass(frozen=True)
class Bundle:
    """A manifest with the blobs it lists, by SHA-256."""

    manifest: Manifest
    blobs: Mapping[str, bytes]

    @property
    def encoded(self) -> bytes:
        return encode_manifest(self.manifest)

    def ref(self, chunk: int) -> BlobRef:
        """Reference of the manifest's own bytes: the name of the bundle."""
        return describe(self.encoded, chunk)

    def graph_bytes(self, name: str) -> bytes:
        return self.blobs[self.manifest.graph(name).blob.sha256]


def file_of(bundle: Bundle) -> bytes:
    """The bundle's file; that of an equal bundle is equal."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(zipfile.ZipInfo(MANIFEST_NAME, _EPOCH), bundle.encoded)
        for sha256 in sorted(bundle.blobs):
            info = zipfile.ZipInfo(f"blobs/{sha256}", _EPOCH)
            archive.writestr(info, bundle.blobs[sha256], zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


def write_bundle(bundle: Bundle, path: Path) -> None:
    """Write the bundle's file; an interrupted write leaves no half file behind."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, file_of(bundle))


def read_bundle(path: Path) -> Bundle:
    """The bundle in a file, every digest checked; BundleError says what is wrong with the file."""
    with _opened(path) as archive:
        manifest = decode_manifest(_entry(archive, MANIFEST_NAME, _MANIFEST_LIMIT))
        blobs = {
            ref.sha256: verified(ref, _entry(archive, f"blobs/{ref.sha256}", ref.size))
            for ref in manifest.blobs
        }
    return Bundle(manifest, blobs)


def read_manifest(path: Path) -> Manifest:
    """The manifest in a bundle's file, whose graphs are not read; BundleError as in :func:`read_bundle`."""
    with _opened(path) as archive:
        return decode_manifest(_entry(archive, MANIFEST_NAME, _MANIFEST_LIMIT))


@contextmanager
def _opened(path: Path) -> Iterator[zipfile.ZipFile]:
    """The file as an archive; BundleError for whatever is wrong with it."""
    try:
        with zipfile.ZipFile(path) as archive:
            yield archive
    except BundleError:
        raise
    except FileNotFoundError as error:
        raise BundleError(
            f"there is no bundle at {path}; make one with `edgefl export`", path=str(path)
        ) from error
    except Exception as error:  # a damaged zip raises a dozen unrelated types, RuntimeError among them
        raise BundleError(
            f"{path} is not a whole bundle ({error}): it is corrupt or truncated; export or fetch it again",
            path=str(path),
        ) from error


def _entry(archive: zipfile.ZipFile, name: str, most: int) -> bytes:
    """One entry, unpacked only if it says that it is no larger than it may be."""
    size = archive.getinfo(name).file_size
    if size > most:
        raise BundleError(
            f"{name} unpacks to {size} bytes where at most {most} are expected; export or fetch the bundle again",
            size=size,
            limit=most,
        )
    return archive.read(name)
