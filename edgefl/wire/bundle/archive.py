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
from edgefl.wire.blobs import BlobRef, describe, verify_blob
from edgefl.wire.bundle.manifest import Manifest, decode_manifest, encode_manifest
from edgefl.wire.keys import KeyPair, short_key, verify

MANIFEST_NAME = "manifest.msgpack"
_MANIFEST_LIMIT = 64 << 20  # far beyond any manifest; keeps a zip bomb from filling the memory
_EPOCH = (1980, 1, 1, 0, 0, 0)  # a fixed date: equal bundles are equal files


@dataclass(frozen=True)
class BundleArchive:
    """Content of a bundle: its manifest (table of contents) and the blobs that it lists, by hexadecimal SHA-256."""

    manifest: Manifest
    blobs: Mapping[str, bytes]

    @property
    def encoded(self) -> bytes:
        """Encoded manifest. Its SHA-256 names the bundle."""
        return encode_manifest(self.manifest)

    def ref(self, chunk: int) -> BlobRef:
        """Return the reference of the manifest's bytes, whose digest names the bundle.

        Args:
            chunk: Bytes of one chunk.
        """
        return describe(self.encoded, chunk)

    def graph_bytes(self, name: str) -> bytes:
        """Return the artifact of the graph ``name``. Raises BundleError if the manifest lists no such graph."""
        return self.blobs[self.manifest.graph(name).blob.sha256]


def encode_bundle(bundle: BundleArchive) -> bytes:
    """Return the bytes of a zip file with the bundle. Equal bundles give equal bytes."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(zipfile.ZipInfo(MANIFEST_NAME, _EPOCH), bundle.encoded)
        for sha256 in sorted(bundle.blobs):
            info = zipfile.ZipInfo(f"blobs/{sha256}", _EPOCH)
            archive.writestr(info, bundle.blobs[sha256], zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


def write_bundle(bundle: BundleArchive, path: Path) -> None:
    """Write the bundle to the file ``path`` atomically. Creates missing folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, encode_bundle(bundle))


def read_bundle(path: Path) -> BundleArchive:
    """Read a bundle from a file and verify the digest of each blob.

    Raises:
        BundleError: The file does not exist, or is damaged.
    """
    with _open_archive(path) as archive:
        manifest = decode_manifest(_read_entry(archive, MANIFEST_NAME, _MANIFEST_LIMIT))
        blobs = {
            ref.sha256: verify_blob(ref, _read_entry(archive, f"blobs/{ref.sha256}", ref.size))
            for ref in manifest.blobs
        }
    return BundleArchive(manifest, blobs)


def read_manifest(path: Path) -> Manifest:
    """Read the manifest from a bundle's file, without its blobs.

    Raises:
        BundleError: The file does not exist, or is damaged.
    """
    with _open_archive(path) as archive:
        return decode_manifest(_read_entry(archive, MANIFEST_NAME, _MANIFEST_LIMIT))


@contextmanager
def _open_archive(path: Path) -> Iterator[zipfile.ZipFile]:
    """Open a bundle's file as a zip archive, for use in a ``with`` block.

    Raises:
        BundleError: The file does not exist, or the block raised any error.
    """
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
            error=str(error),
        ) from error


def _read_entry(archive: zipfile.ZipFile, name: str, most: int) -> bytes:
    """Return one entry of the archive. Raises BundleError if its declared size is above ``most`` bytes."""
    size = archive.getinfo(name).file_size
    if size > most:
        raise BundleError(
            f"{name} unpacks to {size} bytes where at most {most} are expected; export or fetch the bundle again",
            size=size,
            limit=most,
        )
    return archive.read(name)


def signed_text(sha256: str) -> bytes:
    """Return the bytes that are signed for the bundle whose manifest has the digest ``sha256``.

    They begin with a prefix that no other kind of signed text has.
    """
    return f"edgefl/v1/bundle/{sha256}".encode()


class Signer:
    """Signer of bundles, with the server's key.

    Args:
        path: Key file. It is created with a random key if it does not exist.

    Raises:
        ConfigError: The file holds no key, or its chain of earlier keys is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.keys = KeyPair(path)

    @property
    def public_key(self) -> str:
        """Public key of the server as 64 hexadecimal digits, the value of a device's ``--server-key``."""
        return self.keys.public_key

    def sign(self, sha256: str) -> bytes:
        """Return the Ed25519 signature (64 bytes) of the bundle whose manifest has the hexadecimal digest ``sha256``."""
        return self.keys.sign(signed_text(sha256))


def check(known: Collection[bytes], sha256: str, signature: bytes) -> None:
    """Check the signature of a bundle.

    Args:
        known: Public keys that are trusted.
        sha256: Digest of the bundle's manifest.
        signature: Signature of the bundle, empty if it has none.

    Raises:
        BundleError: No trusted key made the signature.
    """
    if signature and any(verify(key, signature, signed_text(sha256)) for key in known):
        return
    flaw = "a wrong signature" if signature else "no signature"
    keys = ", ".join(short_key(key) for key in known) or "none"
    raise BundleError(
        f"bundle {sha256[:12]} carries {flaw} for the server key {keys}: it is not loaded; "
        "give the device the key that the server prints, or find out who published this bundle",
        sha256=sha256,
        signed=bool(signature),
    )
