"""Rounds without a broker: a bundle and weights from memory or from files, as a round's task and blobs.

::

    result = train_round(read_bundle(path), weights, LocalData(x, y, "mine"), open_engine("onnx"))
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from edgefl.errors import BundleError, DataError, ProtocolError
from edgefl.wire import tensors
from edgefl.wire.blobs import BlobRef, decompress, describe
from edgefl.wire.bundle.archive import Bundle
from edgefl.wire.bundle.manifest import Graph, Manifest
from edgefl.wire.limits import Limits
from edgefl.wire.tensors import Array, Arrays
from edgefl_device.data.samples import LabelSpec, Local
from edgefl_device.engine.base import Engine
from edgefl_device.round.bounds import check_runtime
from edgefl_device.round.costs import Profiler
from edgefl_device.round.graphs import GraphSettings, Step
from edgefl_device.round.job import Job
from edgefl_device.round.parts import parts_of
from edgefl_device.round.runner import RoundResult, RoundRunner
from edgefl_device.round.tuning import Tuning
from edgefl_device.store.checkpoint_rows import Checkpoint


@dataclass(frozen=True)
class MemoryBlobs:
    """The blobs of a bundle, and weights by unit."""

    blobs: dict[str, bytes] = field(default_factory=dict)

    def get(self, ref: BlobRef) -> bytes:
        return decompress(ref, self.blobs[ref.sha256], Limits().max_blob_bytes)

    def get_all(self, refs: Sequence[BlobRef]) -> Iterator[bytes]:
        return (self.get(ref) for ref in refs)

    def add(self, data: bytes) -> BlobRef:
        ref = describe(data, Limits().chunk_bytes)
        self.blobs[ref.sha256] = data
        return ref


class NoCheckpoints:
    """Keeps none: what it is for is begun again, never taken up."""

    def save_checkpoint(self, nonce: str, checkpoint: Checkpoint) -> None:
        return

    def checkpoint(self, nonce: str) -> Checkpoint | None:
        return None


def train_round(
    bundle: Bundle,
    weights: Mapping[str, Array],
    data: Local,
    engine: Engine,
    *,
    seed: int = 0,
    hyper: Mapping[str, float] | None = None,
    carry: Mapping[str, Array] | None = None,
    samples: int = 0,
    watch: Callable[[Step], None] = lambda _: None,
    tuning: Tuning | None = None,
) -> RoundResult:
    """One round of the bundle's algorithm in this process: the same steps, batches and noise as over a broker.

    ``weights`` are the model's by global names, or those that the server cuts out for the tier. ``hyper`` are scalars
    that the server would announce (default: the manifest's), ``carry`` what the last round left, ``samples`` the most
    rows to use (0: all). ``tuning`` chooses forms of graphs
    (None: their own). DataError if the data do not fit the model or hold NaN, BundleError if graphs, weights and ports
    disagree.
    """
    manifest = bundle.manifest
    check_runtime(manifest, engine)
    job, blobs = offline(
        bundle, weights, manifest.of_round, "the weights", seed=seed, hyper=hyper, samples=samples
    )
    fitted = data.fitted(manifest.data, LabelSpec.of(manifest), parts_of(engine, manifest, blobs))
    with tempfile.TemporaryDirectory(prefix="edgefl-round-") as folder:
        runner = RoundRunner(
            engine=engine,
            manifest=manifest,
            blobs=blobs,
            memory=NoCheckpoints(),
            profiler=Profiler(),
            settings=GraphSettings(Path(folder), checkpoint_steps=1 << 30, watch=watch, tuning=tuning),
        )
        return runner.run(job, fitted, dict(carry or {}))


def offline(
    bundle: Bundle,
    weights: Mapping[str, Array],
    graphs: Sequence[Graph],
    source: str,
    *,
    seed: int = 0,
    hyper: Mapping[str, float] | None = None,
    samples: int = 0,
) -> tuple[Job, MemoryBlobs]:
    """A job on ``weights``: a model's, by global names, or a tier's own. ``source`` says in errors where they are from.

    BundleError if ``graphs``, those that will run, read tensors that are not among them.
    """
    manifest = bundle.manifest
    by_unit = _by_unit(manifest, weights)
    _check(manifest, graphs, {key for part in by_unit.values() for key in part}, source)
    masks = {port.label: port.mask for graph in graphs for port in graph.inputs_of("weights") if port.mask}
    blobs = MemoryBlobs(dict(bundle.blobs))
    job = Job(
        run="offline",
        round=0,
        tier=manifest.tier,
        seed=seed,
        nonce="",
        samples=samples,
        model_version=source,
        bundle=blobs.add(bundle.encoded),
        units={
            name: (blobs.add(tensors.dump(part, {key: masks[key] for key in part.keys() & masks.keys()})),)
            for name, part in by_unit.items()
        },
        hyper=dict(hyper or {}),
    )
    return job, blobs


def read_weights(path: Path) -> Arrays:
    """The weights in a file; DataError if there is none, or it holds none."""
    try:
        return tensors.load(path.read_bytes())
    except FileNotFoundError as error:
        raise DataError(
            f"there is no file {path}; a run leaves model.safetensors in its folder", path=str(path)
        ) from error
    except OSError as error:
        raise DataError(
            f"{path} cannot be read: {error.strerror or error}; name a file of weights", path=str(path)
        ) from error
    except ProtocolError as error:
        raise DataError(f"{path} holds no weights: {error.message}", path=str(path)) from error


def _by_unit(manifest: Manifest, weights: Mapping[str, Array]) -> dict[str, Arrays]:
    names = (*(unit for chunk in manifest.prefix for unit in chunk.units), *manifest.suffix)
    by_unit = {
        name: {key: array for key, array in weights.items() if key.startswith(f"{name}.")} for name in names
    }
    if not any(by_unit.values()):
        by_unit[manifest.suffix[0]] = dict(weights)  # a payload, whose tensors are not named after it
    return by_unit


def _check(manifest: Manifest, graphs: Sequence[Graph], held: set[str], source: str) -> None:
    for graph in graphs:
        missing = [port.label for port in graph.inputs_of("weights") if port.label not in held]
        if missing:
            raise BundleError(
                f"graph {graph.name!r} reads {missing[0]!r}, which is not in {source}: the server cuts the weights of "
                f"tier {manifest.tier!r} out of the model. Take what it cuts (a compiled bundle's `share`, or over the "
                "broker, whose `out` can be used here), or the bundle of a tier that trains whole units",
                missing=missing,
            )
