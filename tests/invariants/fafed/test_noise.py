"""Both gradients of an iteration see one batch and one dropout mask: invariants 12 and 13 of fafed.md, section 7."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from edgefl.algorithms.adaptive.fafed import fafed
from edgefl.algorithms.adaptive.stem import stem
from edgefl.contract.algorithm import Algorithm, Function
from edgefl.contract.tensors import Tensors, TensorSpec, prefixed, select
from edgefl.objective.derivatives import gradient
from edgefl.objective.objective import Objective
from edgefl.submodels.output_side.submodel import OutputSide
from reproduce.fafed.three_clients import Itself
from tests.invariants.embracingfl.tiny import tiny
from tests.invariants.fafed.tiny import X, traced, with_step
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
    """New noise for every step of every client; ``batch.1`` is another batch."""

    def feed(_function: Function, step: int) -> Tensors:
        generator = torch.Generator().manual_seed(1000 * number + 10 * step + client.number)
        draw = partial(torch.randn, (1, D), generator=generator, dtype=torch.float64)
        y = torch.zeros(1, dtype=torch.float64)
        return prefixed("batch.0", {"x": SIGMA * draw(), "y": y}) | prefixed(
            "batch.1", {"x": SIGMA * draw(), "y": y}
        )

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


@pytest.mark.parametrize("alpha", mostly_slow([0.1, 0.5, 0.9], [0.5]))
def test_12_two_batches_give_the_variance_that_the_spec_names_as_wrong(alpha: float) -> None:
    expected = (1 + (1 - alpha) ** 2) / (1 - (1 - alpha) ** 2) * SIGMA**2
    wrong = _reading_two(with_step(algorithm(alpha), _two_batches(algorithm(alpha))))
    assert abs(float(errors(wrong)) / expected - 1) < 0.05
    assert expected > 1.2 * alpha / (2 - alpha) * SIGMA**2


def _two_batches(made: Algorithm) -> Callable[[Tensors], Tensors]:
    """STEM whose old gradient comes from ``batch.1``."""
    right = made.phases[0].function.fn

    def fn(given: Tensors) -> Tensors:
        old = select(given, "state.weights") | select(given, "state.previous")
        _, _, same, _ = gradient(OBJECTIVE, old, given, 0)
        _, _, other, _ = gradient(OBJECTIVE, old, given, 1)
        past = 1 - given["state.alphas"][int(given["state.step"])]
        out = right(given)
        return out | {f"state.m.{X}": out[f"state.m.{X}"] + past * (same[X] - other[X])}

    return fn


def _reading_two(made: Algorithm) -> Algorithm:
    (phase,) = made.phases
    ports = phase.function.inputs
    more = {"batch.1.x": ports["batch.0.x"], "batch.1.y": ports["batch.0.y"]}
    return replace(made, phases=(replace(phase, function=replace(phase.function, inputs={**ports, **more})),))


def test_12_averaging_over_clients_divides_the_variance_by_their_number() -> None:
    assert abs(float(errors(algorithm(0.5), clients=2)) / (0.5 / 1.5 / 2) - 1) < 0.05


# -- one dropout mask ------------------------------------------------------------------------------------------


class Dropping(nn.Sequential):
    """A classifier with dropout between its layers."""

    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(12, 9), nn.ReLU(), nn.Dropout(0.5), nn.Linear(9, 3))


def difference(
    objective: Objective, make: Callable[..., Algorithm], seed: int = 0, *, masks: int = 1
) -> dict[str, Tensor]:
    """gn - go at x_t = x_{t-1}: what is m where m and alpha are 0. Two ``masks``: the wrong variant, one for each."""
    made = make(objective, batch=4, steps=2)
    step = made.phases[0].function if masks == 1 else _other_mask(made, objective)
    given = step.example(seed)
    for name in objective.trainable:
        given[f"state.previous.{name}"] = given[f"state.weights.{name}"]
        given[f"state.m.{name}"] = torch.zeros_like(given[f"state.m.{name}"])
    given |= {
        "state.alphas": torch.zeros(2),
        "hyper.ext": torch.tensor(1.0),
    }
    return select(step(given), "state.m")


@pytest.mark.parametrize("make", [fafed, stem])
def test_13_with_dropout_equal_points_give_equal_gradients(make: Callable[..., Algorithm]) -> None:
    objective = Objective(nn.Sequential(OrderedDict(net=Dropping())), TensorSpec((3, 4)))
    assert objective.noise(4)
    assert all(not tensor.any() for tensor in difference(objective, make).values())


def _other_mask(made: Algorithm, objective: Objective) -> Function:
    """The algorithm's step with a dropout mask of its own for the old gradient."""
    step = made.phases[0].function

    def fn(given: Tensors) -> Tensors:
        out, old = step.fn(given), select(given, "state.weights") | select(given, "state.previous")
        flipped = {name: 1 - mask for name, mask in given.items() if name.startswith("noise.")}
        _, _, same, _ = gradient(objective, old, given)
        _, _, other, _ = gradient(objective, old, given | flipped)
        past = 1 - given["state.alphas"][0]
        return out | {
            f"state.m.{name}": out[f"state.m.{name}"] + past * (same[name] - other[name]) for name in same
        }

    return replace(step, fn=fn)


@pytest.mark.parametrize("make", [fafed, stem])
def test_13_fails_for_a_dropout_mask_for_each_gradient(make: Callable[..., Algorithm]) -> None:
    objective = Objective(nn.Sequential(OrderedDict(net=Dropping())), TensorSpec((3, 4)))
    apart = difference(objective, make, masks=2)
    assert max(float(tensor.abs().max()) for tensor in apart.values()) > 1e-3


def test_13_a_recurrent_model_begins_both_evaluations_alike() -> None:
    spec = tiny("lstm_lm")
    assert all(
        not tensor.any() for tensor in difference(Objective.of(OutputSide(spec, 0, 1)), fafed).values()
    )
