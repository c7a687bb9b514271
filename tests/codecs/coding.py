"""Coded updates without a device: a codec's ``finish`` in torch, and what the server makes of its bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from edgefl.algorithms import catalog as algorithms
from edgefl.codecs import catalog as codecs
from edgefl.codecs.apply import apply_codec
from edgefl.codecs.codec import Codec
from edgefl.contract.algorithm import Algorithm
from edgefl.contract.tensors import Tensors, TensorSpec, prefixed, select
from edgefl.models.spec import ModelSpec
from edgefl.models.zoo.catalog import build_model
from edgefl.objective.objective import Objective
from edgefl.submodels import catalog as kinds
from edgefl.submodels.submodel import Submodel
from edgefl.wire.tensors import Array, Arrays
from edgefl.wire.update.decode import decode
from edgefl_server.aggregate.aggregator import Aggregator, layout_of
from tests.support.arrays import weights_of

Reals = npt.NDArray[np.float64]


def small() -> ModelSpec:
    """124 parameters with batch norm in 6 tensors, 12 moving statistics; no size is a multiple of 8."""
    return build_model("fedbat_cnn", size=4, widths=(2, 4), classes=3)


@dataclass(frozen=True, eq=False)
class Coding:
    """The local round of one codec on one submodel; only its ``finish`` is ever run."""

    codec: Codec
    submodel: Submodel

    @classmethod
    def of(
        cls, codec: str, spec: ModelSpec | None = None, kind: str = "output_side", /, **options: object
    ) -> Coding:
        cut = {"gamma": 0.25} if kind != "output_side" else {}
        return cls(codecs.build(codec, **options), kinds.build(spec or small(), kind, **cut))

    @cached_property
    def objective(self) -> Objective:
        return Objective.of(self.submodel)

    @cached_property
    def algorithm(self) -> Algorithm:
        training = self.codec.training
        name, options = (training.algorithm, dict(training.options)) if training else ("sgd", {})
        return apply_codec(
            self.codec, algorithms.build(name, self.objective, batch=2, steps=2, **options), self.objective
        )

    @property
    def regions(self) -> dict[str, None]:
        """Those of a submodel that holds whole tensors."""
        return dict.fromkeys(self.objective.carrier.update)

    @cached_property
    def weights(self) -> Tensors:
        return {name: tensor.detach().clone() for name, tensor in self.submodel.spec.weights.items()}

    @property
    def arrays(self) -> Arrays:
        """The round's weights."""
        return weights_of(self)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self.weights.items()}

    def finish(self, left: Tensors, *, seed: int = 0, carry: Tensors | None = None) -> tuple[Arrays, Tensors]:
        """(the update's arrays, what stays on the device) of training that left ``left``; nothing was carried at first."""
        ports = self.algorithm.finish.inputs
        uniform = noise(ports, seed)
        held = {name: spec.zeros() for name, spec in ports.items() if name.startswith("carry.")}
        held |= carry or {}
        out = self.algorithm.finish(
            prefixed("weights", self.weights) | prefixed("state.weights", left) | uniform | held
        )
        update = {name: tensor.numpy() for name, tensor in select(out, "update").items()}
        return update, prefixed("carry", select(out, "carry"))

    def decoded(self, update: Mapping[str, Array]) -> Arrays:
        return decode(self.algorithm.form, update, self.regions, self.shapes)

    def averaged(self, *updates: tuple[Mapping[str, Array], int], old: Arrays | None = None) -> Arrays:
        """The new weights after these (update, samples)."""
        weights = self.arrays if old is None else old
        aggregator = Aggregator(layout_of(weights), weight_limit=sum(n for _, n in updates), device="cpu")
        for update, samples in updates:
            aggregator.add(aggregator.check(update, self.regions, self.algorithm.form), samples)
        return aggregator.result(weights)

    def moved(self, seed: int, size: float = 0.01) -> Tensors:
        """Weights that training could have left: every entry changed by about ``size``, variances still above 0."""
        generator = torch.Generator().manual_seed(seed)
        return {
            name: (tensor + size * torch.randn(tensor.shape, generator=generator)).abs()
            if name.endswith("running_var")
            else tensor + size * torch.randn(tensor.shape, generator=generator)
            for name, tensor in self.weights.items()
        }

    def with_zeros(self, left: Tensors, every: int = 3) -> Tensors:
        """``left``, where each third entry of a tensor did not change."""
        kept = {name: tensor.clone() for name, tensor in left.items()}
        for name, tensor in kept.items():
            tensor.reshape(-1)[::every] = self.weights[name].reshape(-1)[::every]
        return kept


def noise(ports: Mapping[str, TensorSpec], seed: int) -> Tensors:
    """Uniform numbers for the ports of that role."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.rand(spec.shape, generator=generator)
        for name, spec in ports.items()
        if name.startswith("noise.")
    }


def difference(after: Mapping[str, Array], before: Mapping[str, Array], name: str) -> Reals:
    return after[name].astype(np.float64) - before[name].astype(np.float64)
