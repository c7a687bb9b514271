"""A bundle and weights from files, as a round's blobs: what a device without a broker works with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from device_runtime.round.job import Job
from edgefl.wire import tensors
from edgefl.wire.blobs import BlobRef, describe
from edgefl.wire.bundle.archive import Bundle
from edgefl.wire.compression import unpacked
from edgefl.wire.errors import BundleError, DataError, ProtocolError
from edgefl.wire.limits import Limits
from edgefl.wire.tensors import Arrays


@dataclass(frozen=True)
class FileBlobs:
    """The blobs of a bundle, and weights by unit."""

    blobs: dict[str, bytes] = field(default_factory=dict)

    def get(self, ref: BlobRef) -> bytes:
        return unpacked(ref, self.blobs[ref.sha256], Limits().max_blob_bytes)

    def get_all(self, refs: Sequence[BlobRef]) -> Iterator[bytes]:
        return (self.get(ref) for ref in refs)

    def add(self, data: bytes) -> BlobRef:
        ref = describe(data, Limits().chunk_bytes)
        self.blobs[ref.sha256] = data
        return ref


def offline(bundle: Bundle, path: Path) -> tuple[Job, FileBlobs]:
    """A job on the weights in the file ``path``: a model's, by global names, or those that a personalization left.

    DataError if there is no such file; BundleError if the bundle's graphs read tensors that are not in it.
    """
    manifest, weights = bundle.manifest, _read(path)
    names = (*(unit for chunk in manifest.prefix for unit in chunk.units), *manifest.suffix)
    by_unit = {
        name: {key: array for key, array in weights.items() if key.startswith(f"{name}.")} for name in names
    }
    if not any(by_unit.values()):
        by_unit[manifest.suffix[0]] = weights  # a payload, whose tensors are not named after it
    _check(bundle, {key for part in by_unit.values() for key in part}, path)
    blobs = FileBlobs(dict(bundle.blobs))
    job = Job(
        run="offline",
        round=0,
        tier=manifest.tier,
        seed=0,
        nonce="",
        samples=0,
        model_version=path.name,
        bundle=blobs.add(bundle.encoded),
        units={name: (blobs.add(tensors.dump(part)),) for name, part in by_unit.items()},
        hyper={},
    )
    return job, blobs


def _read(path: Path) -> Arrays:
    try:
        return tensors.load(path.read_bytes())
    except FileNotFoundError as error:
        raise DataError(
            f"there is no file {path}; a run leaves model.safetensors in its folder", path=str(path)
        ) from error
    except ProtocolError as error:
        raise DataError(f"{path} holds no weights: {error.message}", path=str(path)) from error


def _check(bundle: Bundle, held: set[str], path: Path) -> None:
    """Of the graphs that a personalization runs."""
    manifest = bundle.manifest
    used = [chunk.graph for chunk in manifest.prefix] + [manifest.evaluate, manifest.personalize]
    for graph in (manifest.graph(name) for name in used if name):
        missing = [port.label for port in graph.inputs_of("weights") if port.label not in held]
        if missing:
            raise BundleError(
                f"graph {graph.name!r} reads {missing[0]!r}, which {path} does not hold: the server cuts the weights of "
                f"tier {manifest.tier!r} out of the model. Personalize over the broker, whose --out can be used here, or "
                "take the bundle of a tier that trains whole units",
                missing=missing,
            )
