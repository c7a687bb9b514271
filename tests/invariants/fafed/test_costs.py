"""FAFED invariants 17 and 18: floats that travel and gradients that are taken, of it and of its baselines."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn

from edgefl import algorithms
from edgefl.contract.algorithm import Algorithm
from edgefl.contract.tensors import TensorSpec
from edgefl.objective.derivatives import counting
from edgefl.objective.objective import Objective
from edgefl.optimizers import OPTIMIZERS, with_optimizer
from tests.support.reference import Client, Completed, federated

CLIENTS, SAMPLES, BATCH, STEPS = 3, 12, 4, 5
FEATURES = 3
D = FEATURES * 2 + 2
UP = {
    "fafed": 3,
    "stem": 2,
    "scaffold": 2,
    "fedavg": 1,
    "fedadam": 1,
    "fedyogi": 1,
    "fedadagrad": 1,
    "fedams": 1,
}
"""Floats for each parameter, per client and round (fafed.md 2.3)."""
GRADIENTS = {name: 2 if name in ("fafed", "stem") else 1 for name in UP}


@dataclass
class Numbered:
    """Half the squared distance from labels that are the samples' numbers; it remembers whom it saw, call by call."""

    seen: list[tuple[int, ...]] = field(default_factory=list)

    def each(self, out: Tensor, y: Tensor) -> Tensor:
        self.seen.append(tuple(int(number) for number in y[:, 0]))
        return ((out - y) ** 2).sum(dim=1) / 200

    def correct(self, out: Tensor, y: Tensor) -> Tensor:
        return torch.zeros(len(y))

    def label(self, out: TensorSpec) -> TensorSpec:
        return out


def built(name: str, loss: Numbered) -> Algorithm:
    module = nn.Sequential(OrderedDict(dense=nn.Linear(FEATURES, 2)))
    objective = Objective(module, TensorSpec((FEATURES,)), loss)
    training = {"batch": BATCH, "steps": STEPS, "lr": 0.01}
    if name in OPTIMIZERS:
        return with_optimizer(algorithms.build("fedavg", objective, **training), name)
    return algorithms.build(name, objective, **training)


def rounds_of(algorithm: Algorithm, rounds: int) -> list[Completed]:
    generator = torch.Generator().manual_seed(1)
    weights = {
        "dense.weight": torch.randn(2, FEATURES, generator=generator),
        "dense.bias": torch.zeros(2),
    }
    clients = []
    for number in range(CLIENTS):
        numbers = torch.arange(SAMPLES, dtype=torch.float32)[:, None].repeat(1, 2) + 100 * number
        clients.append(Client(number, torch.randn(SAMPLES, FEATURES, generator=generator), numbers))
    return list(federated(algorithm, weights, clients, rounds=rounds, seed=2))


def floats(tensors: Mapping[str, Tensor]) -> int:
    assert all(tensor.dtype == torch.float32 for tensor in tensors.values())
    return sum(tensor.numel() for tensor in tensors.values())


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", UP)
def test_17_a_round_moves_as_many_floats_up_as_the_table_says(name: str) -> None:
    algorithm = built(name, Numbered())

    last = rounds_of(algorithm, len(algorithm.opening) + 2)[-1]

    assert sum(map(floats, last.updates.values())) == UP[name] * CLIENTS * D


def test_17_the_first_exchange_moves_one_gradient_of_each_client() -> None:
    algorithm = built("fafed", Numbered())

    [opening] = rounds_of(algorithm, 1)

    assert len(algorithm.opening) == 1
    assert sum(map(floats, opening.updates.values())) == CLIENTS * D


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", UP)
def test_18_a_round_takes_as_many_gradients_as_the_table_says(name: str) -> None:
    loss = Numbered()
    algorithm = built(name, loss)
    openings = len(algorithm.opening)

    with counting() as before:
        rounds_of(algorithm, openings + 1)
    loss.seen.clear()
    with counting() as after:
        rounds_of(algorithm, openings + 2)

    wanted = GRADIENTS[name] * STEPS * CLIENTS
    assert after.gradients - before.gradients == wanted
    assert after.products == 0
    assert len(loss.seen) == after.gradients, "each gradient counted is one pass through the loss"


@pytest.mark.parametrize("name", ["fafed", "stem"])
def test_18_both_gradients_of_a_step_see_the_same_samples(name: str) -> None:
    loss = Numbered()
    algorithm = built(name, loss)

    rounds_of(algorithm, len(algorithm.opening) + 1)

    main = loss.seen[-2 * STEPS * CLIENTS :]
    pairs = list(zip(main[::2], main[1::2], strict=True))
    assert all(new == old for new, old in pairs)
    assert len({new for new, _ in pairs}) > CLIENTS, "each step draws samples of its own"
