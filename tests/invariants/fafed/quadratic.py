"""Users whose losses are known in closed form, in float64, as models and samples that every algorithm takes.

A sample of a quadratic user holds the A and the b of ``w^T A w / 2 - b^T w``, so a user with one sample has full batches,
and one with many has noise. Samples of logistic users are features with labels in {0, 1}.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from edgefl.contract.algorithm import Algorithm
from edgefl.contract.tensors import Tensors, TensorSpec, prefixed
from edgefl.models.losses import BinaryCrossEntropy, Loss
from edgefl.models.spec import sequential
from edgefl.objective.objective import Objective
from tests.support.reference import Client

NAME = "only.w"
"""The one parameter of a quadratic."""


class Quadratic(nn.Module):
    """x (B, d, d + 1), A and b side by side -> ``w^T A w / 2 - b^T w`` (B,)."""

    def __init__(self, dimension: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(dimension, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        a, b = x[..., :-1], x[..., -1]
        out: Tensor = ((a @ self.w - 2 * b) @ self.w) / 2
        return out


@dataclass(frozen=True)
class Value:
    """The model's output is the loss itself; labels are sample numbers, which say nothing."""

    def each(self, out: Tensor, y: Tensor) -> Tensor:
        return out

    def correct(self, out: Tensor, y: Tensor) -> Tensor:
        return torch.zeros(len(out))

    def label(self, out: TensorSpec) -> TensorSpec:
        return TensorSpec((), torch.int64, 2)


def quadratic(dimension: int, loss: Loss | None = None) -> Objective:
    spec = TensorSpec((dimension, dimension + 1), torch.float64)
    return Objective(sequential([("only", Quadratic(dimension))]), spec, loss or Value())


def logistic(dimension: int, loss: Loss | None = None) -> Objective:
    """``log(1 + e^(x w)) - y x w``, one weight per feature and no bias."""
    linear = nn.Linear(dimension, 1, bias=False, dtype=torch.float64)
    spec = TensorSpec((dimension,), torch.float64)
    return Objective(sequential([("only", linear)]), spec, loss or BinaryCrossEntropy())


def elu_net(inside: int = 5, hidden: int = 4, classes: int = 3) -> Objective:
    """A net of one hidden layer with ELU, and the cross-entropy of ``classes``."""
    first, last = nn.Linear(inside, hidden), nn.Linear(hidden, classes)
    net = sequential([("first", first), ("elu", nn.ELU()), ("last", last)]).double()
    return Objective(net, TensorSpec((inside,), torch.float64))


def sample(a: Tensor, b: Tensor) -> Tensor:
    """A and b as one sample (1, d, d + 1)."""
    return torch.cat((a, b.unsqueeze(-1)), -1).unsqueeze(0)


def user(number: int, a: Tensor, b: Tensor) -> Client:
    """A quadratic user whose every batch is all of its data."""
    return Client(number, sample(a, b), torch.zeros(1, dtype=torch.int64))


def positive(dimension: int, seed: int, low: float = 0.5, high: float = 2.0) -> Tensor:
    """A symmetric matrix with eigenvalues in [low, high], in no special directions."""
    generator = torch.Generator().manual_seed(seed)
    basis = torch.linalg.qr(normal((dimension, dimension), generator))[0]
    values = low + (high - low) * torch.rand(dimension, generator=generator, dtype=torch.float64)
    return basis @ torch.diag(values) @ basis.T


def normal(shape: Sequence[int], generator: torch.Generator | int) -> Tensor:
    if isinstance(generator, int):
        generator = torch.Generator().manual_seed(generator)
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float64)


def random_weights(objective: Objective, seed: int, scale: float = 0.5) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {name: scale * normal(spec.shape, generator) for name, spec in objective.weights.items()}


def random_batch(objective: Objective, rows: int, seed: int) -> tuple[Tensor, Tensor]:
    """Normal features and valid labels, as the objective reads them."""
    generator = torch.Generator().manual_seed(seed)
    labels = objective.labels(rows)
    y = torch.randint(0, labels.below or 2, labels.shape, generator=generator)
    return normal((rows, *objective.boundary.shape), generator), y.to(
        torch.float64 if labels.dtype.is_floating_point else labels.dtype
    )


Batch = tuple[Tensor, Tensor]


def batches(*given: Batch) -> Tensors:
    """``batch.0.x``, ``batch.0.y``, ``batch.1.x``, ..."""
    found: Tensors = {}
    for stream, (x, y) in enumerate(given):
        found |= {f"batch.{stream}.x": x, f"batch.{stream}.y": y}
    return found


def stepped(algorithm: Algorithm, weights: Tensors, given: Tensors, **hyper: float) -> Tensors:
    """The weights after one step of the algorithm on these batches."""
    step = algorithm.phases[0].function
    scalars = {
        name: torch.tensor(value, dtype=torch.float64) for name, value in {**algorithm.hyper, **hyper}.items()
    }
    available = prefixed("state.weights", weights) | prefixed("hyper", scalars) | given
    out = step({name: available[name] for name in step.inputs})
    return {name: out[f"state.weights.{name}"] for name in weights}


def direction(algorithm: Algorithm, weights: Tensors, given: Tensors, **hyper: float) -> Tensors:
    """G by name: what a step with learning rate 1 subtracts."""
    after = stepped(algorithm, weights, given, **{**hyper, "lr": 1.0})
    return {name: weights[name] - after[name] for name in weights}


def flat(tensors: Mapping[str, Tensor]) -> Tensor:
    """All entries in one vector."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors.values()])


def alike(vector: Tensor, like: Mapping[str, Tensor]) -> Tensors:
    """The inverse of :func:`flat`."""
    parts = vector.split([tensor.numel() for tensor in like.values()])
    return {name: part.view_as(like[name]) for name, part in zip(like, parts, strict=True)}


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())
