"""The three clients of FAFED's Theorem 1: adaptive steps for each by itself lead away from the optimum of the mean.

Client i's function of one number x is ``a_i h(x)``, h(x) = x^2 for |x| <= 1 and 2|x| - 1 beyond, with a = (3, -1, -1). The
mean is h/3, whose only stationary point is 0. (The paper prints f_1 with a jump; its gradients are these.)
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from edgefl.contract.algorithm import Algorithm, Function
from edgefl.contract.tensors import Tensors, TensorSpec, prefixed
from edgefl.objective.objective import Objective
from tests.support.reference import Client, Feed

SLOPES = (3.0, -1.0, -1.0)
NAME = "point.x"


class Point(nn.Module):
    """a h(x) for samples a (B, 1); the number x is the only parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(1))

    def forward(self, a: Tensor) -> Tensor:
        size = self.x.abs()
        return a * torch.where(size <= 1, self.x * self.x, 2 * size - 1)


class Itself:
    """The loss is what the model says: out (B, 1). Labels (B,) are not read."""

    def each(self, out: Tensor, y: Tensor) -> Tensor:
        return out.squeeze(1)

    def correct(self, out: Tensor, y: Tensor) -> Tensor:
        return torch.zeros_like(y)

    def label(self, out: TensorSpec) -> TensorSpec:
        return TensorSpec(())


def objective() -> Objective:
    return Objective(nn.Sequential(OrderedDict(point=Point())), TensorSpec((1,)), Itself())


def weights(x: float = 10.0) -> Mapping[str, Tensor]:
    """The common starting point, in double precision."""
    return {NAME: torch.full((1,), x, dtype=torch.float64)}


def clients() -> list[Client]:
    """One sample each, which says which function is theirs."""
    return [
        Client(number, torch.full((1, 1), slope, dtype=torch.float64), torch.zeros(1, dtype=torch.float64))
        for number, slope in enumerate(SLOPES)
    ]


def feed(_exchange: Algorithm, client: Client, _number: int) -> Feed:
    """The same sample in every batch."""
    batch = prefixed("batch.0", {"x": client.x, "y": client.y})

    def constant(_function: Function, _step: int) -> Tensors:
        return batch

    return constant
