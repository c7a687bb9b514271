"""Rounds without a broker, on a bundle and weights in memory or in files.

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
from edgefl.wire.bundle.archive import BundleArchive
from edgefl.wire.bundle.manifest import Graph, Manifest
from edgefl.wire.limits import Limits
from edgefl.wire.tensors import Array, Arrays
from edgefl_device.data.samples import LocalSource, fit_rows
from edgefl_device.engine.base import Engine
from edgefl_device.round.autotune import Autotuner
from edgefl_device.round.control import RoundControl, StepProgress
from edgefl_device.round.executor import LoadedBundleParts, check_runtime
from edgefl_device.round.graph_loader import GraphLoader, RoundProfiler
from edgefl_device.round.job import Job
from edgefl_device.round.trainer import LocalTrainer, RoundResult
from edgefl_device.store.database import Checkpoint


@dataclass(frozen=True)
class MemoryBlobs:
    """Blobs in memory, by SHA-256."""

    blobs: dict[str, bytes] = field(default_factory=dict)

    def get(self, ref: BlobRef) -> bytes:
        """Return the decompressed bytes of the blob ``ref``."""
        return decompress(ref, self.blobs[ref.sha256], Limits().max_blob_bytes)

    def get_all(self, refs: Sequence[BlobRef]) -> Iterator[bytes]:
        """Return the decompressed bytes of the blobs ``refs``, one by one."""
        return (self.get(ref) for ref in refs)

    def add(self, data: bytes) -> BlobRef:
        """Add a blob, and return its reference."""
        ref = describe(data, Limits().chunk_bytes)
        self.blobs[ref.sha256] = data
        return ref


class NoCheckpoints:
    """Storage without checkpoints, so that an interrupted round starts from the beginning."""

    def save_checkpoint(self, nonce: str, checkpoint: Checkpoint) -> None:
        """Ignore the checkpoint; nothing is stored."""

    def checkpoint(self, nonce: str) -> Checkpoint | None:
        """Return None: there is never a checkpoint."""
        return None

    def make_room_beside(self, nbytes: int) -> None:
        """Do nothing, because records are in a temporary folder."""


class WatchedControl(RoundControl):
    """Control of an offline round, which passes steps to the user's function."""

    def __init__(self, watch: Callable[[StepProgress], None]) -> None:
        super().__init__()
        self._watch = watch

    def report(self, step: StepProgress) -> None:
        """Pass a finished step to the user's function."""
        self._watch(step)


def train_round(
    bundle: BundleArchive,
    weights: Mapping[str, Array],
    data: LocalSource,
    engine: Engine,
    *,
    seed: int = 0,
    hyper: Mapping[str, float] | None = None,
    carry: Mapping[str, Array] | None = None,
    samples: int = 0,
    watch: Callable[[StepProgress], None] = lambda _: None,
    tuner: Autotuner | None = None,
) -> RoundResult:
    """Run one round of the bundle's algorithm in this process: the same steps, batches and noise as over a broker.

    Args:
        bundle: The compiled bundle of a tier.
        weights: The model's weights by global names, or the tier's part of them.
        data: The local samples.
        engine: Engine for the bundle's format.
        seed: Seed of batches and noise.
        hyper: Scalars that the server would announce; None: the manifest's.
        carry: Arrays of the previous round's carry, by label; None: zeros.
        samples: Largest number of rows to use; 0: all.
        watch: Receives each finished step.
        tuner: Chooses variants of graphs; None: their own form.

    Raises:
        DataError: The data do not fit the model, or hold NaN.
        BundleError: Graphs, weights and ports disagree.
    """
    manifest = bundle.manifest
    check_runtime(manifest, engine)
    job, blobs = offline_job(
        bundle, weights, manifest.of_round, "the weights", seed=seed, hyper=hyper, samples=samples
    )
    fitted = fit_rows(data, manifest, LoadedBundleParts(engine, manifest, blobs))
    with tempfile.TemporaryDirectory(prefix="edgefl-round-") as folder:
        loader = GraphLoader(engine, manifest, blobs, RoundProfiler(), tuner)
        trainer = LocalTrainer(loader, NoCheckpoints(), Path(folder))
        return trainer.train(job, fitted, dict(carry or {}), WatchedControl(watch))


def offline_job(
    bundle: BundleArchive,
    weights: Mapping[str, Array],
    graphs: Sequence[Graph],
    source: str,
    *,
    seed: int = 0,
    hyper: Mapping[str, float] | None = None,
    samples: int = 0,
) -> tuple[Job, MemoryBlobs]:
    """Return a job on ``weights``, and the blobs that it names.

    Args:
        bundle: The compiled bundle of a tier.
        weights: The model's weights by global names, or the tier's part of them.
        graphs: The graphs that will run.
        source: Origin of the weights, for errors.
        seed: Seed of batches and noise.
        hyper: Scalars that the server would announce; None: the manifest's.
        samples: Largest number of rows to use; 0: all.

    Raises:
        BundleError: ``graphs`` read tensors that are not among the weights.
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
    """Return the tensors of a weights file by name.

    Raises:
        DataError: The file does not exist or is damaged.
    """
    try:
        return tensors.load(path.read_bytes())
    except FileNotFoundError as error:
        raise DataError(
            f"there is no file {path}; a run leaves model.safetensors in its folder", path=str(path)
        ) from error
    except OSError as error:
        raise DataError(
            f"{path} cannot be read: {error.strerror or error}; name a file of weights",
            path=str(path),
            errno=error.errno,
        ) from error
    except ProtocolError as error:
        raise DataError(
            f"{path} holds no weights: {error.message}", path=str(path), error=error.message
        ) from error


def _by_unit(manifest: Manifest, weights: Mapping[str, Array]) -> dict[str, Arrays]:
    names = (*(unit for chunk in manifest.prefix for unit in chunk.units), *manifest.suffix)
    by_unit = {
        name: {key: array for key, array in weights.items() if key.startswith(f"{name}.")} for name in names
    }
    if (
        weights and manifest.suffix and not by_unit[manifest.suffix[0]]
    ):  # a payload: its tensors are not named after it
        named = {key for part in by_unit.values() for key in part}
        by_unit[manifest.suffix[0]] = {key: array for key, array in weights.items() if key not in named}
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
