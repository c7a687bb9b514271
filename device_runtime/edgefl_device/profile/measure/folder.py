"""Bundle unpacked into a folder, so that a measuring process reads only the blobs that it needs."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from edgefl.system.files import naming
from edgefl.wire.blobs import BlobRef, decompress, describe
from edgefl.wire.bundle import sources
from edgefl.wire.bundle.archive import BundleArchive
from edgefl.wire.bundle.manifest import Manifest, decode_manifest
from edgefl.wire.bundle.sources import OpOrigin
from edgefl.wire.limits import Limits

_MANIFEST = "manifest"


class BundleFolder:
    """Blobs of a bundle as files named by digest. Records the bytes and time of reading them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.reads: list[tuple[int, float]] = []
        """Bytes and milliseconds of each, in their order."""
        self.asked = 0.0
        """When blobs were last asked for together (``time.perf_counter``): the start of a chunk."""

    @classmethod
    def unpacked(cls, bundle: BundleArchive, path: Path) -> BundleFolder:
        """Write the blobs and manifest of ``bundle`` into the folder ``path``, and return it as BundleFolder."""
        folder = cls(path)
        with naming(path):
            for sha256, data in bundle.blobs.items():
                (path / sha256).write_bytes(data)
            (path / _MANIFEST).write_bytes(bundle.encoded)
        return folder

    @property
    def manifest(self) -> Manifest:
        return decode_manifest((self.path / _MANIFEST).read_bytes())

    @property
    def digest(self) -> str:
        """SHA-256 of the manifest, which names the bundle."""
        return describe((self.path / _MANIFEST).read_bytes(), Limits().chunk_bytes).sha256

    def get(self, ref: BlobRef) -> bytes:
        start = time.perf_counter()
        data = decompress(ref, (self.path / ref.sha256).read_bytes(), Limits().max_blob_bytes)
        self.reads.append((len(data), 1e3 * (time.perf_counter() - start)))
        return data

    def get_all(self, refs: Sequence[BlobRef]) -> Iterator[bytes]:
        self.asked = time.perf_counter()
        return (self.get(ref) for ref in refs)

    def add(self, data: bytes) -> BlobRef:
        ref = describe(data, Limits().chunk_bytes)
        with naming(self.path):
            (self.path / ref.sha256).write_bytes(data)
        return ref

    def nodes(self, manifest: Manifest, graph: str) -> dict[str, OpOrigin]:
        """Return the sources (module, phase, work) of a graph's nodes by node name; empty if the folder lacks them."""
        ref = manifest.sources
        if not isinstance(ref, BlobRef) or not (self.path / ref.sha256).exists():
            return {}
        return sources.decode(self.get(ref)).nodes(graph)
