"""Tiers of every kind with a bundle that personalizes, and their weights as a server publishes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from edgefl.algorithms.submodels.frozen_forward import chunk_forward
from edgefl.analysis.personal.evaluate import AdaptableModel
from edgefl.api.model import sample_spec
from edgefl.contract.algorithm import Algorithm
from edgefl.models.spec import ModelSpec
from edgefl.submodels.catalog import build
from edgefl.submodels.submodel import Submodel
from edgefl.wire import tensors
from edgefl.wire.blobs import BlobRef, describe
from edgefl.wire.bundle.archive import BundleArchive
from edgefl_device.round.job import Job
from edgefl_export.compiler.request import ChunkForward
from tests.analysis.personal.users import personal
from tests.invariants.embracingfl.tiny import tiny
from tests.support.arrays import as_tensors
from tests.support.bundles import build_bundle

CHUNK, BATCH = 4096, 8


@dataclass(frozen=True)
class Tier:
    """A tier, its algorithm and its bundle."""

    spec: ModelSpec
    submodel: Submodel
    algorithm: Algorithm
    prefix: tuple[ChunkForward, ...]
    bundle: BundleArchive
    form: str
    blobs: dict[str, bytes]

    @property
    def adapter(self) -> AdaptableModel:
        """The same model in torch."""
        weights = {name: tensor.numpy() for name, tensor in self.spec.weights.items()}
        payload = self.submodel.place(weights, 1).payload or weights
        held = as_tensors(payload)
        return AdaptableModel(self.algorithm, held, [part.forward for part in self.prefix])

    def get(self, ref: BlobRef) -> bytes:
        return self.blobs[ref.sha256]

    def get_all(self, refs: Sequence[BlobRef]) -> list[bytes]:
        return [self.get(ref) for ref in refs]

    def add(self, data: bytes, chunk: int = CHUNK) -> BlobRef:
        ref = describe(data, chunk)
        self.blobs[ref.sha256] = data
        return ref

    def job(self, chunk: int = CHUNK) -> Job:
        """A round on the model's initial weights."""
        weights = {name: tensor.numpy() for name, tensor in self.spec.weights.items()}
        placed = self.submodel.place(weights, 1)
        parts = {
            unit: {key: array for key, array in weights.items() if key.startswith(f"{unit}.")}
            for unit in self.spec.units
        }
        if placed.payload:
            parts = {self.bundle.manifest.suffix[0]: placed.payload}
        return Job(
            run="run",
            round=3,
            tier="tier",
            seed=0,
            nonce="",
            samples=0,
            model_version="v3",
            bundle=self.add(self.bundle.encoded, chunk),
            units={
                unit: (self.add(tensors.dump(part, placed.masks), chunk),) for unit, part in parts.items()
            },
            hyper={},
        )


@cache
def tier_of(
    model: str, kind: str = "output_side", *, chunk: int = CHUNK, form: str = "onnx", **options: Any
) -> Tier:
    """A tier of the small ``model``, exported once in the format ``form``."""
    return made(tiny(model), kind, chunk=chunk, form=form, **options)


def made(
    spec: ModelSpec, kind: str = "output_side", *, chunk: int = CHUNK, form: str = "onnx", **options: Any
) -> Tier:
    """A tier of any model."""
    submodel = build(spec, kind, **options)
    algorithm = personal(submodel, BATCH)
    prefix = tuple(
        ChunkForward(part.units, chunk_forward(part.module, part.sample, batch=BATCH))
        for part in submodel.prefix
    )
    bundle = build_bundle(
        algorithm,
        submodel.units or ("tier/submodel",),
        prefix=prefix,
        model=spec.name,
        data=sample_spec(spec, None),
        chunk_bytes=chunk,
        format=form,
    )
    return Tier(spec, submodel, algorithm, prefix, bundle, form, dict(bundle.blobs))
