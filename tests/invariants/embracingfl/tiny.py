"""Small models with every feature that an invariant of the EmbracingFL spec speaks of, and how to drive them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from edgefl.algorithms.submodels.frozen_forward import chunk_forward, multi_step_forward
from edgefl.contract.algorithm import Function
from edgefl.contract.tensors import Tensors, TensorSpec
from edgefl.models.layers.initial import initialize
from edgefl.models.spec import ModelSpec, sequential
from edgefl.models.zoo.basic import ConvPool, Dense, bilstm, mlp
from edgefl.models.zoo.language import lstm_lm
from edgefl.models.zoo.resnet import resnet8, resnet20
from edgefl.objective.derivatives import gradient
from edgefl.objective.objective import Objective
from edgefl.submodels.output_side.submodel import OutputSide
from reproduce.embracingfl.measures import KEEP, directions, similarity
from tests.support.reference import Feed


def tiny(name: str) -> ModelSpec:
    """A small model of each kind, weights and moving statistics away from their initial values."""
    widths = (4, 6, 8)
    spec = {
        "resnet8": lambda: resnet8(size=12, widths=widths, seed=1),
        "resnet8 static": lambda: resnet8(size=12, widths=widths, bn="static", seed=1),
        "resnet20": lambda: resnet20(in_channels=1, size=12, widths=widths, seed=1),
        "cnn": narrow_cnn,
        "mlp": lambda: mlp(size=6, hidden=(9, 7), seed=1),
        "bilstm": lambda: bilstm(length=8, vocabulary=20, features=6, hidden=5, rate=0.0, seed=1),
        "lstm_lm": lambda: lstm_lm(length=5, vocabulary=20, features=6, hidden=5, rate=0.0, seed=1),
    }[name]()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for key, tensor in spec.module.state_dict().items():
            if key.endswith(("running_var", "bn.weight", "bn1.weight", "bn2.weight")):
                tensor.uniform_(0.5, 1.5, generator=generator)
            elif key.endswith(("running_mean", "bias")):
                tensor.normal_(0, 0.2, generator=generator)
    return spec


def narrow_cnn() -> ModelSpec:
    """The units of the FEMNIST CNN for 8 x 8 pictures of 5 classes, with few channels."""

    def units() -> nn.Sequential:
        convolutions = [("conv1", ConvPool(1, 6)), ("conv2", ConvPool(6, 8))]
        dense = [("dense1", Dense(8 * 2 * 2, 24, "relu")), ("dense2", Dense(24, 5, None))]
        return sequential([*convolutions, *dense])

    return ModelSpec("cnn", initialize(units, 1), TensorSpec((1, 8, 8)), 5, accounting_batch=1)


def samples(spec: ModelSpec, count: int, seed: int = 3) -> tuple[Tensor, Tensor]:
    """Random rows of the model's input, and labels."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(0, spec.classes, (count,), generator=generator)
    shape = (count, *spec.sample.shape)
    if spec.sample.dtype == torch.int64:
        return torch.randint(0, 20, shape, generator=generator), y
    return torch.randn(shape, generator=generator), y


def weights_of(spec: ModelSpec) -> Tensors:
    return {name: tensor.clone() for name, tensor in spec.weights.items()}


def record(submodel: OutputSide, x: Tensor, batch: int) -> Tensor:
    """The record of ``x``: the submodel's chunks, run one after the other."""
    chunks = [chunk_forward(chunk.module, chunk.sample, batch=batch) for chunk in submodel.prefix]
    return multi_step_forward(chunks, submodel.spec.weights, x)


def walk(x: Tensor, y: Tensor, batch: int) -> Feed:
    """Batches that walk through the rows and wrap around."""

    def feed(_function: Function, step: int) -> Tensors:
        rows = torch.arange(step * batch, (step + 1) * batch).remainder(len(x))
        return {"batch.0.x": x[rows], "batch.0.y": y[rows]}

    return feed


def local_gradient(submodel: OutputSide, weights: Tensors, x: Tensor, y: Tensor) -> Tensors:
    """The gradient a client computes at ``weights``, on boundary rows ``x``."""
    objective = Objective.of(submodel)
    return gradient(objective, weights, {"batch.0.x": x, "batch.0.y": y})[2]


def chunkings(units: tuple[str, ...]) -> Iterator[list[tuple[str, ...]]]:
    """Every way to cut a list of units into consecutive groups."""
    positions = range(1, len(units))
    for number in range(len(units)):
        for cuts in itertools.combinations(positions, number):
            ends = (0, *cuts, len(units))
            yield [units[start:stop] for start, stop in itertools.pairwise(ends)]


def svcca(a: Tensor, b: Tensor, keep: int = KEEP) -> float:
    """Return SVCCA of two layers' activations."""
    return similarity(directions(a, keep), directions(b, keep))
