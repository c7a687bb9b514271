"""Downloads of simulated clients: weights decoded from the blobs that a server would publish."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from edgefl.wire import tensors
from edgefl.wire.blobs import BlobRef, Compression, compress, decompress
from edgefl.wire.bundle.manifest import Manifest
from edgefl.wire.patches import apply_patch, to_float32
from edgefl.wire.tensors import Arrays
from edgefl_server.publish.downlink import Downlink
from edgefl_server.publish.model import ModelVersion
from edgefl_server.run_spec import RunSpec
from edgefl_server.storage.checkpoints import PublishedModels


@dataclass
class DownlinkBlobs:
    """Encoded blobs of the current model, in memory."""

    chunk: int
    compression: Compression
    held: dict[str, tuple[BlobRef, bytes]] = field(default_factory=dict)

    def offer(self, data: bytes, chunk: int = 0, *, plain: bool = False) -> BlobRef:
        return self.put(*compress(data, chunk or self.chunk, "none" if plain else self.compression))

    def put(self, ref: BlobRef, data: bytes) -> BlobRef:
        return self.held.setdefault(ref.sha256, (ref, data))[0]

    def encoded(self, sha256: str) -> bytes:
        return self.held[sha256][1]

    def keep_only(self, wanted: Mapping[str, tuple[BlobRef, ...]]) -> None:
        names = {ref.sha256 for line in wanted.values() for ref in line}
        self.held = {name: each for name, each in self.held.items() if name in names}


@dataclass(frozen=True)
class FetchedWeights:
    """Download of a tier's clients: weights by the labels of ports, and its size in bytes."""

    weights: Arrays
    nbytes: int


class SimulatedDownlink:
    """Publisher of successive models in the federation's encoding."""

    def __init__(self, spec: RunSpec, folder: Path, run: str) -> None:
        limits, downlink = spec.limits, spec.downlink
        self._spec = spec
        self._limit = limits.max_blob_bytes
        self._blobs = DownlinkBlobs(limits.chunk_bytes, downlink.compression)
        self._downlink = Downlink(downlink, self._blobs, PublishedModels(folder, run), limits.max_blob_bytes)

    def publish(self, model: ModelVersion) -> None:
        """Publish a new model."""
        self._downlink.publish(model.number, model.version, model.parts(self._spec))
        self._blobs.keep_only(self._downlink.units)

    def resume(self, model: ModelVersion) -> None:
        """Publish a model again after a restart, with the same bytes."""
        self._downlink.resume(model.number, model.version, model.parts(self._spec))

    def received(self, model: ModelVersion) -> Arrays:
        """Return the weights of ``model`` by global name as clients receive them, with the rounding of the encoding."""
        return self._downlink.received(model.weights, model.parts(self._spec))

    def fetch(self, manifest: Manifest) -> FetchedWeights:
        """Return the download of a client of this tier that has no weights yet."""
        names = (*(unit for chunk in manifest.prefix for unit in chunk.units), *manifest.suffix)
        arrays: Arrays = {}
        nbytes = 0
        for name in dict.fromkeys(names):
            first, *patches = self._downlink.units.get(name, ())
            whole = to_float32(tensors.load(self._unpack(first)))
            for patch in patches:
                whole = apply_patch(whole, self._unpack(patch))
            arrays |= whole
            nbytes += first.size + sum(ref.size for ref in patches)
        return FetchedWeights(arrays, nbytes)

    def _unpack(self, ref: BlobRef) -> bytes:
        return decompress(ref, self._blobs.encoded(ref.sha256), self._limit)
