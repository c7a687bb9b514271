"""SimulatedDownlink of simulated clients: weights decoded from the blobs that a server would publish."""

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
    """Compressed blobs of the current model, in memory. ``held``: (reference, bytes) by the SHA-256 of the bytes;
    ``chunk``: default size of a chunk in bytes.
    """

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
    """Download of one client of a tier: its weights in float32, and their compressed size in bytes. A weight has the
    label of the graph input (port) that reads it.
    """

    weights: Arrays
    nbytes: int


class SimulatedDownlink:
    """Publisher of successive models in the encoding of the federation's downlink.

    It computes the weights that clients receive, and the size of their downloads.

    Args:
        spec: Specification of the run.
        folder: Folder with the record of published models, for a restart.
        run: Identifier of the run.
    """

    def __init__(self, spec: RunSpec, folder: Path, run: str) -> None:
        limits, downlink = spec.limits, spec.downlink
        self._spec = spec
        self._limit = limits.max_blob_bytes
        self._blobs = DownlinkBlobs(limits.chunk_bytes, downlink.compression)
        self._downlink = Downlink(downlink, self._blobs, PublishedModels(folder, run), limits.max_blob_bytes)

    def publish(self, model: ModelVersion) -> None:
        """Encode ``model`` as the next version, and drop the blobs that it does not need."""
        self._downlink.publish(model.number, model.version, model.parts(self._spec))
        self._blobs.keep_only(self._downlink.units)

    def resume(self, model: ModelVersion) -> None:
        """Publish ``model`` again after a restart, with the same bytes as before."""
        self._downlink.resume(model.number, model.version, model.parts(self._spec))

    def received(self, model: ModelVersion) -> Arrays:
        """Return all weights of ``model`` by global name, after encoding and decoding: rounded as clients receive them."""
        return self._downlink.received(model.weights, model.parts(self._spec))

    def fetch(self, manifest: Manifest) -> FetchedWeights:
        """Return the download of a client that has no earlier weights. ``manifest``: manifest of the client's tier."""
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
