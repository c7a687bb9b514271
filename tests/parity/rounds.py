"""Whole rounds on the device runtime, from a bundle in memory, and the same rounds in torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from edgefl import algorithms
from edgefl.algorithms.submodels.frozen_forward import chunk_forward, multi_step_forward
from edgefl.api.model import sample_spec
from edgefl.contract.algorithm import Algorithm, Function
from edgefl.contract.tensors import Tensors, TensorSpec, prefixed
from edgefl.models.spec import ModelSpec
from edgefl.objective.objective import Objective
from edgefl.submodels.output_side.submodel import OutputSide
from edgefl.wire import tensors
from edgefl.wire.blobs import BlobRef, describe
from edgefl.wire.bundle.archive import BundleArchive
from edgefl.wire.bundle.manifest import SAMPLE
from edgefl.wire.tensors import Array
from edgefl_device.data.samples import Batches, FittedData, LabelSpec, LocalData
from edgefl_device.engine.base import Engine
from edgefl_device.round.control import RoundControl
from edgefl_device.round.graph_loader import GraphLoader, RoundProfiler, WeightResidency
from edgefl_device.round.job import Job
from edgefl_device.round.trainer import LocalTrainer, RoundResult
from edgefl_device.store.database import Checkpoint
from edgefl_export.compiler.request import ChunkForward
from tests.parity.forms import engine_of
from tests.support.bundles import build_bundle
from tests.support.reference import run_round

CHUNK_BYTES = 4096


@dataclass
class MemoryBlobs:
    """Blobs that need no broker."""

    blobs: dict[str, bytes]

    def get(self, ref: BlobRef) -> bytes:
        return self.blobs[ref.sha256]

    def get_all(self, refs: Sequence[BlobRef]) -> list[bytes]:
        return [self.get(ref) for ref in refs]


@dataclass
class CountedCheckpoints:
    """Storage of a device that was never killed: notes the steps of checkpoints."""

    kept: list[int] = field(default_factory=list)

    def save_checkpoint(self, nonce: str, checkpoint: Checkpoint) -> None:
        self.kept.append(checkpoint.step)

    def checkpoint(self, nonce: str) -> Checkpoint | None:
        return None

    def make_room_beside(self, nbytes: int) -> None: ...


@dataclass(frozen=True)
class DeviceRound:
    """A round on a device, ready to run."""

    trainer: LocalTrainer
    job: Job

    def run(self, data: FittedData, carry: Mapping[str, Array] | None = None) -> RoundResult:
        return self.trainer.train(self.job, data, dict(carry or {}), RoundControl())


@dataclass(frozen=True)
class Exported:
    """One tier: its algorithm in torch, its bundle, and the forward functions of its prefix."""

    spec: ModelSpec
    submodel: OutputSide
    algorithm: Algorithm
    forward: tuple[Function, ...]
    bundle: BundleArchive

    @property
    def contents(self) -> dict[str, bytes]:
        """The initial weights as the server publishes them, by unit."""
        weights = {name: tensor.numpy() for name, tensor in self.spec.weights.items()}
        return by_unit(weights, self.spec.units)


def exported(submodel: OutputSide, *, batch: int, steps: int, lr: float, form: str = "onnx") -> Exported:
    spec = submodel.spec
    algorithm = algorithms.build("sgd", Objective.of(submodel), batch=batch, steps=steps, lr=lr)
    forward = tuple(chunk_forward(chunk.module, chunk.sample, batch=batch) for chunk in submodel.prefix)
    bundle = build_bundle(
        algorithm,
        tuple(name for name, _ in submodel.suffix.named_children()),
        prefix=tuple(
            ChunkForward(chunk.units, function)
            for chunk, function in zip(submodel.prefix, forward, strict=True)
        ),
        model=spec.name,
        data=sample_spec(spec, None),
        format=form,
    )
    return Exported(spec, submodel, algorithm, forward, bundle)


def local_data(spec: ModelSpec, samples: int, seed: int) -> LocalData:
    rng = np.random.default_rng(seed)

    def rows(sample: TensorSpec) -> Array:
        shape = (samples, *sample.shape)
        return (
            rng.standard_normal(shape, np.float32)
            if sample.below is None
            else rng.integers(0, sample.below, shape)
        )

    x, others = rows(spec.sample), {name: rows(each) for name, each in spec.others.items()}
    return LocalData(x, rng.integers(0, spec.classes, (samples, *spec.label.shape)), "random", others)


def _fitted(tier: Exported, data: LocalData) -> FittedData:
    manifest = tier.bundle.manifest
    return data.fitted(manifest.data, LabelSpec.of(manifest))


def published(
    bundle: BundleArchive,
    contents: Mapping[str, bytes],
    *,
    seed: int,
    hyper: Mapping[str, float] | None = None,
) -> tuple[Job, MemoryBlobs]:
    """Return a round in which the server publishes ``contents`` by unit, and the blobs that it names."""
    units = {name: describe(content, CHUNK_BYTES) for name, content in contents.items()}
    job = Job(
        run="run",
        round=1,
        tier=bundle.manifest.tier,
        seed=seed,
        nonce="nonce",
        samples=0,
        model_version="version",
        bundle=bundle.ref(CHUNK_BYTES),
        units={name: (ref,) for name, ref in units.items()},
        hyper=dict(hyper or {}),
    )
    blobs = {units[name].sha256: content for name, content in contents.items()}
    return job, MemoryBlobs({**bundle.blobs, **blobs})


def device_round(
    bundle: BundleArchive,
    contents: Mapping[str, bytes],
    engine: Engine,
    folder: Path,
    *,
    seed: int,
    hyper: Mapping[str, float] | None = None,
    checkpoint_steps: int = 2,
) -> DeviceRound:
    """Return a round of ``bundle`` with the weights of :func:`published`."""
    job, blobs = published(bundle, contents, seed=seed, hyper=hyper)
    loader = GraphLoader(engine, bundle.manifest, blobs, RoundProfiler())
    return DeviceRound(LocalTrainer(loader, CountedCheckpoints(), folder, checkpoint_steps), job)


def by_unit(
    weights: Mapping[str, Array], units: Iterable[str], masks: Mapping[str, Array] | None = None
) -> dict[str, bytes]:
    """Return the safetensors that the server publishes of ``weights``, by unit."""
    return {
        unit: tensors.dump(
            {
                name: array
                for name, array in weights.items()
                if name.rpartition("/")[2].startswith(f"{unit}.")
            },
            masks or {},
        )
        for unit in units
    }


def on_device(
    tier: Exported, data: LocalData, seed: int, folder: Path, form: str = "onnx"
) -> tuple[RoundResult, WeightResidency]:
    """The round as the device runtime runs it."""
    made = device_round(tier.bundle, tier.contents, engine_of(form), folder, seed=seed)
    return made.run(_fitted(tier, data)), made.trainer.loader.residency


def in_torch(tier: Exported, data: LocalData, seed: int) -> Tensors:
    """The update of the same round from the same functions in torch."""
    fitted = _fitted(tier, data)
    x = torch.from_numpy(fitted.rows(np.arange(len(fitted))))
    y = torch.from_numpy(fitted.y)
    weights = {name: tensor.clone() for name, tensor in tier.spec.weights.items()}
    others = {name: torch.from_numpy(array) for name, array in fitted.others.items()}
    rows = multi_step_forward(tier.forward, weights, x, others) if tier.forward else x
    parts = prefixed("batch.0", {"x": rows, SAMPLE: x, **others, "y": y})
    batches = Batches(seed, len(fitted), tier.bundle.manifest.batch)

    def feed(_: Function, step: int) -> dict[str, Tensor]:
        indices = torch.from_numpy(batches.indices(0, step))
        return {name: tensor[indices] for name, tensor in parts.items()}

    return run_round(tier.algorithm, weights, feed).update
