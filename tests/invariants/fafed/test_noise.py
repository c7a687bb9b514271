"""Both gradients of an iteration see one batch and one dropout mask: invariants 12 and 13 of fafed.md, section 7."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from edgefl.algorithms.adaptive.fafed import fafed
from edgefl.algorithms.adaptive.stem import stem
from edgefl.contract.algorithm import Algorithm, Function
from edgefl.contract.tensors import Tensors, TensorSpec, prefixed, select
from edgefl.objective.objective import Objective
from edgefl.submodels.output_side.submodel import OutputSide
from reproduce.fafed.theorems import Itself
from tests.invariants.embracingfl.tiny import tiny
from tests.invariants.fafed.tiny import X, traced
from tests.rings.rows import mostly_slow
from tests.support.reference import Client, Feed

D, Q, ROUNDS, SIGMA = 4000, 5, 20, 1.0


class Shaken(nn.Module):
    """|x|^2 / 2 + xi . x for samples xi (B, D): the gradient is x + xi, in D coordinates that do not know each other."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(D))

    def forward(self, xi: Tensor) -> Tensor:
        return (0.5 * self.x * self.x + xi * self.x).sum(dim=1, keepdim=True)


OBJECTIVE = Objective(nn.Sequential(OrderedDict(point=Shaken())), TensorSpec((D,)), Itself())


def shaking(_exchange: Algorithm, client: Client, number: int) -> Feed:
    """New noise for every step of every client."""

    def feed(_function: Function, step: int) -> Tensors:
        generator = torch.Generator().manual_seed(1000 * number + 10 * step + client.number)
        x = SIGMA * torch.randn((1, D), generator=generator, dtype=torch.float64)
        return prefixed("batch.0", {"x": x, "y": torch.zeros(1, dtype=torch.float64)})

    return feed


def errors(made: Algorithm, clients: int = 1) -> Tensor:
    """The variance of e_t = mbar_t - xbar_t over coordinates, of late iterations far enough from each other."""
    start = {X: torch.ones(D, dtype=torch.float64)}
    people = [Client(i, torch.zeros(1, D), torch.zeros(1)) for i in range(clients)]
    found = traced(made, start, people, rounds=ROUNDS + 1, feed=shaking)
    late = range(Q * ROUNDS // 2, Q * ROUNDS + 1, 10)
    return torch.stack([found.mean(t, lambda each: each.m - each.x) for t in late]).var()


def algorithm(alpha: float) -> Algorithm:
    return stem(OBJECTIVE, batch=1, steps=Q, lr=0.01, alpha=alpha)


@pytest.mark.parametrize("alpha", mostly_slow([0.1, 0.5, 0.9], [0.1, 0.9]))
def test_12_the_error_has_the_variance_of_one_batch_for_both_gradients(alpha: float) -> None:
    expected = alpha / (2 - alpha) * SIGMA**2
    assert abs(float(errors(algorithm(alpha))) / expected - 1) < 0.05


def test_12_averaging_over_clients_divides_the_variance_by_their_number() -> None:
    assert abs(float(errors(algorithm(0.5), clients=2)) / (0.5 / 1.5 / 2) - 1) < 0.05


# -- one dropout mask ------------------------------------------------------------------------------------------


class Dropping(nn.Sequential):
    """A classifier with dropout between its layers."""

    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(12, 9), nn.ReLU(), nn.Dropout(0.5), nn.Linear(9, 3))


def difference(objective: Objective, make: Callable[..., Algorithm], seed: int = 0) -> dict[str, Tensor]:
    """gn - go at x_t = x_{t-1}: what is m where m and alpha are 0."""
    step = make(objective, batch=4, steps=2).phases[0].function
    given = step.example(seed)
    for name in objective.trainable:
        given[f"state.previous.{name}"] = given[f"state.weights.{name}"]
        given[f"state.m.{name}"] = torch.zeros_like(given[f"state.m.{name}"])
    given |= {"state.alphas": torch.zeros(2), "hyper.ext": torch.tensor(1.0)}
    return select(step(given), "state.m")


@pytest.mark.parametrize("make", [fafed, stem])
def test_13_with_dropout_equal_points_give_equal_gradients(make: Callable[..., Algorithm]) -> None:
    objective = Objective(nn.Sequential(OrderedDict(net=Dropping())), TensorSpec((3, 4)))
    assert objective.noise(4)
    assert all(not tensor.any() for tensor in difference(objective, make).values())


def test_13_a_recurrent_model_begins_both_evaluations_alike() -> None:
    spec = tiny("lstm_lm")
    assert all(
        not tensor.any() for tensor in difference(Objective.of(OutputSide(spec, 0, 1)), fafed).values()
    )
