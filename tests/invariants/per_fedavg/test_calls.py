"""Invariants 8, 9 and 14 of the Per-FedAvg spec: what a step reads and how many derivatives it takes."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from edgefl.algorithms.baselines.fedavg import fedavg_update
from edgefl.algorithms.baselines.sgd import sgd
from edgefl.algorithms.personal.per_fedavg import per_fedavg
from edgefl.contract.algorithm import Algorithm
from edgefl.contract.tensors import Tensors, TensorSpec
from edgefl.objective.derivatives import Counts, counting
from edgefl.objective.objective import Objective
from edgefl.submodels.output_side.submodel import OutputSide
from tests.invariants.embracingfl.tiny import samples, tiny
from tests.invariants.fafed.quadratic import (
    Value,
    batches,
    normal,
    positive,
    quadratic,
    sample,
    stepped,
    user,
)
from tests.invariants.per_fedavg.wrong import TWO_BATCHES, wrong
from tests.rings.rows import mostly_slow
from tests.support.reference import Client, drawn, federated

D = 3


@dataclass(frozen=True)
class Watched(Value):
    """Notes which labels it is asked about, by their place in memory: one batch object, one place."""

    seen: list[int] = field(default_factory=list)

    def each(self, out: Tensor, y: Tensor) -> Tensor:
        self.seen.append(y.data_ptr())
        return super().each(out, y)


def given(streams: int) -> Tensors:
    made = [
        (sample(positive(D, seed), normal((D,), seed)), torch.full((1,), seed % 2, dtype=torch.int64))
        for seed in range(streams)
    ]
    return batches(*made)


def read(algorithm: Algorithm, loss: Watched, tensors: Tensors) -> tuple[list[int], Counts]:
    """The streams whose batches a step read, in order, and the derivatives that it took."""
    places = {y.data_ptr(): int(name.split(".")[1]) for name, y in tensors.items() if name.endswith(".y")}
    loss.seen.clear()
    with counting() as counts:
        stepped(algorithm, {"only.w": normal((D,), 9)}, tensors)
    return [places[place] for place in loss.seen], counts


@pytest.mark.parametrize(
    ("options", "streams", "gradients", "products"),
    [
        ({"mode": "fo"}, [1, 0], 2, 0),
        ({"mode": "hf"}, [1, 0, 2, 2], 4, 0),
        ({"mode": "hf", "hessian_batch": "inner"}, [1, 0, 1, 1], 4, 0),
        ({"mode": "exact"}, [1, 0, 2], 2, 1),
        ({"mode": "exact", "hessian_batch": "inner"}, [1, 0, 1], 2, 1),
        ({"mode": "fo", "inner_steps": 2}, [1, 3, 0], 3, 0),
        ({"mode": "hf", "inner_steps": 2}, [1, 3, 0, 4, 4, 2, 2], 7, 0),
        ({"mode": "exact", "inner_steps": 2}, [1, 3, 0, 4, 2], 3, 2),
    ],
)
def test_08_09_a_step_reads_these_batches_and_takes_these_derivatives(
    options: dict[str, Any], streams: list[int], gradients: int, products: int
) -> None:
    loss = Watched()
    algorithm = per_fedavg(quadratic(D, loss), batch=1, **options)

    found, counts = read(algorithm, loss, given(5))

    assert found == streams
    assert (counts.gradients, counts.products) == (gradients, products)


def test_09_fails_for_a_quotient_of_gradients_on_two_batches() -> None:
    loss = Watched()
    found, counts = read(wrong(TWO_BATCHES, quadratic(D, loss), batch=1), loss, given(3))
    assert (found, counts.gradients) == ([1, 0, 2, 1], 4)


def test_the_streams_of_a_step_are_drawn_independently_of_each_other() -> None:
    """Rows of D', D and D'' differ, in every step, and none repeats what another stream had a step before."""
    numbered = torch.arange(500, dtype=torch.float64).reshape(-1, 1, 1).expand(-1, D, D + 1)
    client = Client(2, numbered, torch.zeros(500, dtype=torch.int64))
    algorithm = per_fedavg(quadratic(D), batch=20, mode="hf")
    step = algorithm.phases[0].function
    feed = drawn(algorithm, client, 0, 1)
    rows = {
        (at, stream): tuple(feed(step, at)[f"batch.{stream}.x"][:, 0, 0].tolist())
        for at in range(3)
        for stream in range(3)
    }
    assert all(len(set(each)) == 20 for each in rows.values())
    shared = [len(set(a) & set(b)) for a, b in itertools.combinations(rows.values(), 2)]
    assert max(shared) < 8


def test_08_fedavg_takes_one_gradient() -> None:
    loss = Watched()
    algorithm = fedavg_update(quadratic(D, loss), batch=1)
    found, counts = read(algorithm, loss, given(1))
    assert (found, counts.gradients, counts.products) == ([0], 1, 0)


@pytest.mark.parametrize(
    ("options", "streams"),
    [
        ({"mode": "fo"}, {0, 1}),
        ({"mode": "fo", "inner_steps": 3}, {0, 1, 3, 5}),
        ({"mode": "exact", "hessian_batch": "inner"}, {0, 1}),
        ({"mode": "hf"}, {0, 1, 2}),
        ({"mode": "hf", "inner_steps": 2}, {0, 1, 2, 3, 4}),
    ],
)
def test_08_a_step_asks_for_no_other_batches(options: dict[str, Any], streams: set[int]) -> None:
    inputs = per_fedavg(quadratic(D), **options).phases[0].function.inputs
    assert {int(name.split(".")[1]) for name in inputs if name.startswith("batch.")} == streams


MODES: list[dict[str, Any]] = [
    {"mode": "fo"},
    {"mode": "exact"},
    {"mode": "exact", "hessian_batch": "inner"},
    {"mode": "hf"},
    {"mode": "hf", "delta": 1e-2},
    {"mode": "hf", "inner_steps": 2},
]


def trajectory(
    algorithm: Algorithm, weights: Tensors, clients: list[Client], **options: Any
) -> list[Tensors]:
    return [
        done.weights
        for done in federated(algorithm, weights, clients, rounds=3, seed=5, fraction=0.5, **options)
    ]


def same(ours: list[Tensors], theirs: list[Tensors]) -> bool:
    return all(
        torch.equal(mine[name], other[name])
        for mine, other in zip(ours, theirs, strict=True)
        for name in other
    )


def plain(objective: Objective, batch: int, steps: int) -> Algorithm:
    return sgd(objective, batch=batch, steps=steps, lr=0.05, momentum=0.0, weight_decay=0.0)


@pytest.mark.sample(2)
@pytest.mark.parametrize("options", MODES)
def test_14_without_alpha_every_mode_is_fedavg_on_quadratics(options: dict[str, Any]) -> None:
    objective = quadratic(D)
    clients = [user(number, positive(D, number), normal((D,), number)) for number in range(4)]
    algorithm = per_fedavg(objective, batch=1, steps=3, lr=0.05, alpha=0.0, **options)
    weights = {"only.w": normal((D,), 7)}
    assert same(trajectory(algorithm, weights, clients), trajectory(plain(objective, 1, 3), weights, clients))
    adapting = trajectory(algorithm, weights, clients, hyper={"alpha": 0.1})
    assert not same(adapting, trajectory(plain(objective, 1, 3), weights, clients))


@pytest.mark.parametrize(
    ("model", "options"),
    mostly_slow(zip(("cnn", "resnet8") * 3, MODES, strict=True), [("cnn", MODES[2]), ("resnet8", MODES[3])]),
)
def test_14_without_alpha_every_mode_is_fedavg_on_networks(model: str, options: dict[str, Any]) -> None:
    """Mini-batches, float32, moving statistics included."""
    spec = tiny(model)
    objective = Objective.of(OutputSide(spec, 0))
    clients = [Client(number, *samples(spec, 9, seed=number)) for number in range(2)]
    algorithm = per_fedavg(objective, batch=4, steps=2, lr=0.05, alpha=0.0, **options)
    weights = dict(spec.weights)
    assert same(trajectory(algorithm, weights, clients), trajectory(plain(objective, 4, 2), weights, clients))


def test_moving_statistics_are_those_of_the_outer_pass() -> None:
    spec = tiny("resnet8")
    objective = Objective.of(OutputSide(spec, 0))
    names = {name: TensorSpec.of(tensor) for name, tensor in spec.weights.items()}
    x, y = samples(spec, 12)
    streams = batches(*((x[i : i + 4], y[i : i + 4]) for i in (0, 4, 8)))
    algorithm = per_fedavg(objective, batch=4, mode="hf", alpha=0.0)
    step = algorithm.phases[0].function

    def after(tensors: Tensors) -> Tensors:
        state = {f"state.weights.{name}": spec.weights[name] for name in names}
        scalars = {f"hyper.{name}": torch.tensor(value) for name, value in algorithm.hyper.items()}
        out = step({name: (state | scalars | tensors)[name] for name in step.inputs})
        return {name: out[f"state.weights.{name}"] for name in objective.buffers}

    plainly = plain(objective, 4, 1).phases[0].function
    state = {f"state.weights.{name}": spec.weights[name] for name in names}
    expected = plainly({**state, **batches((x[:4], y[:4])), "hyper.lr": torch.tensor(0.0)})

    assert all(
        torch.equal(value, expected[f"state.weights.{name}"]) for name, value in after(streams).items()
    )
    assert objective.buffers
