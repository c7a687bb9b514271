"""A handful of users with linear regressions that differ, in float64, and their gradients by hand.

The algorithms' functions run on them as they are; the oracles beside them are plain numpy on one flat vector
theta = (weights, bias), f_i(theta) = mean over the user's rows of (x . theta - y)^2.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from edgefl.contract.algorithm import Algorithm
from edgefl.contract.server import state_of
from edgefl.contract.tensors import Tensors, TensorSpec
from edgefl.models.losses import SquaredError
from edgefl.models.spec import ModelSpec
from edgefl.objective.objective import Objective
from edgefl.submodels.output_side.submodel import OutputSide
from tests.support.reference import Client, Completed, draw, federated

Vector = npt.NDArray[np.float64]
FEATURES = 3
SEED = 5


@dataclass(frozen=True)
class Users:
    """``sizes`` are the users' numbers of samples."""

    sizes: Sequence[int] = (7, 12, 9)

    @cached_property
    def spec(self) -> ModelSpec:
        torch.manual_seed(0)
        module = nn.Sequential()
        module.add_module("line", nn.Linear(FEATURES, 1))
        return ModelSpec("line", module.double(), TensorSpec((FEATURES,)), 1, loss=SquaredError())

    @cached_property
    def objective(self) -> Objective:
        return Objective.of(OutputSide(self.spec, 0))

    @cached_property
    def clients(self) -> list[Client]:
        rng = np.random.default_rng(3)
        made = []
        for number, size in enumerate(self.sizes):
            x = rng.normal(size=(size, FEATURES)) * (1 + number)
            y = x @ rng.normal(size=FEATURES) + rng.normal(size=size)
            made.append(Client(number, torch.from_numpy(x), torch.from_numpy(y[:, None])))
        return made

    @property
    def theta(self) -> Vector:
        """Where every test begins."""
        return flat(self.spec.weights)

    def gradient(self, user: int, theta: Vector, rows: npt.NDArray[np.int64] | slice = slice(None)) -> Vector:
        """Of the mean over ``rows`` of the user's samples; by default over all."""
        client = self.clients[user]
        x = np.hstack((client.x.numpy(), np.ones((len(client.x), 1))))[rows]
        gradient: Vector = 2 * x.T @ (x @ theta - client.y.numpy()[rows, 0]) / len(x)
        return gradient

    def batch(self, user: int, number: int, step: int, size: int) -> npt.NDArray[np.int64]:
        """Rows that the simulator draws for a user's step of exchange ``number``."""
        return draw(self.sizes[user], size, (SEED, user, number, step, 0)).numpy()

    def run(
        self, algorithm: Algorithm, rounds: int, *, fraction: float = 1.0, **hyper: float
    ) -> list[Completed]:
        found: Iterator[Completed] = federated(
            algorithm,
            self.spec.weights,
            self.clients,
            rounds=rounds,
            seed=SEED,
            fraction=fraction,
            hyper=hyper,
        )
        return list(found)


def flat(tensors: Mapping[str, Tensor]) -> Vector:
    """(weights, bias) as one vector."""
    return torch.cat([tensors[name].reshape(-1) for name in ("line.weight", "line.bias")]).double().numpy()


def state_vector(done: Completed, name: str) -> Vector:
    """One of the server's states, as a vector."""
    return flat(state_of(done.server_state, name))


def named(theta: Vector) -> Tensors:
    """The inverse of :func:`flat`."""
    tensor = torch.from_numpy(theta)
    return {"line.weight": tensor[:FEATURES].reshape(1, FEATURES), "line.bias": tensor[FEATURES:]}
