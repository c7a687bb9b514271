"""A bundle as one file: a zip of the manifest and its blobs, each named by digest. Signatures of bundles.

Over MQTT the same manifest and blobs travel one by one, so tiers share equal graphs. The digest of a manifest covers every
graph it lists, so one signature covers all.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from edgefl.errors import BundleError
from edgefl.system.files import write_whole
from edgefl.wire.blobs import BlobRef, describe, verified
from edgefl.wire.bundle.manifest import Manifest, decode_manifest, encode_manifest
from edgefl.wire.keys import KeyPair, shown, verify

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
        """Return the reference of the manifest's bytes: the name of the bundle."""
        return describe(self.encoded, chunk)

    def graph_bytes(self, name: str) -> bytes:
        return self.blobs[self.manifest.graph(name).blob.sha256]


def file_of(bundle: Bundle) -> bytes:
    """Return the bytes of the bundle's file. Equal bundles have equal files."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(zipfile.ZipInfo(MANIFEST_NAME, _EPOCH), bundle.encoded)
        for sha256 in sorted(bundle.blobs):
            info = zipfile.ZipInfo(f"blobs/{sha256}", _EPOCH)
            archive.writestr(info, bundle.blobs[sha256], zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


def write_bundle(bundle: Bundle, path: Path) -> None:
    """Write the bundle's file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, file_of(bundle))


def read_bundle(path: Path) -> Bundle:
    """Read a bundle and verify every digest. Raises BundleError if the file is damaged."""
    with _opened(path) as archive:
        manifest = decode_manifest(_entry(archive, MANIFEST_NAME, _MANIFEST_LIMIT))
        blobs = {
            ref.sha256: verified(ref, _entry(archive, f"blobs/{ref.sha256}", ref.size))
            for ref in manifest.blobs
        }
    return Bundle(manifest, blobs)


def read_manifest(path: Path) -> Manifest:
    """Read the manifest of a bundle's file without its graphs. Raises BundleError as :func:`read_bundle` does."""
    with _opened(path) as archive:
        return decode_manifest(_entry(archive, MANIFEST_NAME, _MANIFEST_LIMIT))


@contextmanager
def _opened(path: Path) -> Iterator[zipfile.ZipFile]:
    """Open the file as an archive. Raises BundleError for any damage."""
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
    """Return one entry, decompressed only if its declared size is at most ``most`` bytes."""
    size = archive.getinfo(name).file_size
    if size > most:
        raise BundleError(
            f"{name} unpacks to {size} bytes where at most {most} are expected; export or fetch the bundle again",
            size=size,
            limit=most,
        )
    return archive.read(name)


def signed_text(sha256: str) -> bytes:
    """Return the signed text for the bundle whose manifest has this digest.

    Its prefix separates it from other signed texts.
    """
    return f"edgefl/v1/bundle/{sha256}".encode()


class Signer:
    """The server's signing key (:class:`edgefl.wire.keys.KeyPair`), created if missing."""

    def __init__(self, path: Path) -> None:
        self.keys = KeyPair(path)

    @property
    def public_key(self) -> str:
        """Value of a device's ``--server-key``: 64 hexadecimal digits."""
        return self.keys.public_key

    def sign(self, sha256: str) -> bytes:
        return self.keys.sign(signed_text(sha256))


def check(known: Collection[bytes], sha256: str, signature: bytes) -> None:
    """Raise BundleError unless one of the ``known`` keys made ``signature`` for the bundle ``sha256``."""
    if signature and any(verify(key, signature, signed_text(sha256)) for key in known):
        return
    flaw = "a wrong signature" if signature else "no signature"
    keys = ", ".join(shown(key) for key in known) or "none"
    raise BundleError(
        f"bundle {sha256[:12]} carries {flaw} for the server key {keys}: it is not loaded; "
        "give the device the key that the server prints, or find out who published this bundle",
        sha256=sha256,
    )
