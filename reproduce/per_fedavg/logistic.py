"""Users of logistic regression, whose constants are known: the theory's assumptions hold at every w (per_fedavg.md 6.1)."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from edgefl.algorithms.personal.per_fedavg import per_fedavg
from edgefl.analysis.heterogeneity.theory import LossConstants
from edgefl.contract.algorithm import Algorithm
from edgefl.contract.tensors import TensorSpec
from edgefl.models.losses.classification import CROSS_ENTROPY
from edgefl.objective.objective import Objective
from reproduce.batched_clients import together

USERS, SAMPLES, FEATURES, CLASSES = 10, 32, 2, 2
NAME = "linear.weight"
LANDSCAPE = LossConstants(
    B=math.sqrt(2.0), L=0.5, rho=math.sqrt(2.0) / (3 * math.sqrt(3.0)), sigma_g=math.sqrt(2.0), sigma_h=0.5,
    gamma_g2=8.0, gamma_h2=1.0,
)  # fmt: skip
"""Two classes, inputs of norm 1. A sample's loss is softplus(s), s = (w_other - w_own) x, of norm sqrt(2) in w: its first
three derivatives by s are at most 1, 1/4 and 1 / (6 sqrt(3)). Deviations are at most the largest norm (Hessians are >= 0),
and gamma_G = 2 B, gamma_H = 2 L hold for any users (A5)."""


@dataclass(frozen=True)
class Users:
    """``x`` float64 (users, samples, features) of norm 1, ``y`` int64 (users, samples)."""

    x: Tensor
    y: Tensor

    @classmethod
    def drawn(cls, generator: torch.Generator) -> Users:
        """Each with a centre and a separating direction of its own, partly shared, and a tenth of the labels wrong."""
        shape = (USERS, SAMPLES, FEATURES)
        centres = torch.randn(USERS, 1, FEATURES, generator=generator, dtype=torch.float64)
        x = torch.randn(shape, generator=generator, dtype=torch.float64) + centres
        own = torch.randn(USERS, FEATURES, 1, generator=generator, dtype=torch.float64)
        shared = torch.randn(FEATURES, 1, generator=generator, dtype=torch.float64)
        wrong = torch.rand(USERS, SAMPLES, generator=generator) < 0.1
        y = ((x @ (shared + own)).squeeze(-1) > 0) ^ wrong
        return cls(x / x.norm(dim=-1, keepdim=True), y.long())

    def batch(self, number: int, users: Tensor, rows: Tensor) -> dict[str, Tensor]:
        """``batch.<number>`` of clients that are ``users`` (clients,), with rows (clients, size)."""
        at = users[:, None]
        return {f"batch.{number}.x": self.x[at, rows], f"batch.{number}.y": self.y[at, rows]}


def objective() -> Objective:
    """Cross-entropy of a linear layer without bias."""
    module = nn.Sequential(OrderedDict(linear=nn.Linear(FEATURES, CLASSES, bias=False)))
    return Objective(module, TensorSpec((FEATURES,)), CROSS_ENTROPY)


@dataclass(frozen=True)
class Local:
    """Local steps of edgefl's own algorithm ``per_fedavg`` for many clients at once, in float64."""

    algorithm: Algorithm

    @classmethod
    def of(cls, clients: int, **options: Any) -> Local:
        return cls(together(per_fedavg(objective(), **options), clients))

    def step(self, w: Tensor, batches: Mapping[str, Tensor], **hyper: float) -> Tensor:
        """``w`` (clients, classes, features) after one step; ``hyper`` in place of the algorithm's own scalars."""
        scalars = {
            f"hyper.{name}": torch.tensor(value, dtype=torch.float64)
            for name, value in {**self.algorithm.hyper, **hyper}.items()
        }
        given = {f"state.weights.{NAME}": w, **batches, **scalars}
        stepped: Tensor = self.algorithm.phases[0].function(given)[f"state.weights.{NAME}"]
        return stepped

    def direction(self, w: Tensor, batches: Mapping[str, Tensor], **hyper: float) -> Tensor:
        """G: what the step goes along."""
        return w - self.step(w, batches, lr=1.0, **hyper)


def starting_point(clients: int) -> Tensor:
    """0 for every client, (clients, classes, features)."""
    return torch.zeros(clients, CLASSES, FEATURES, dtype=torch.float64)
