"""FIARSE invariants 19 to 23: the server's partial average of submodels, by both rules of who counts (fiarse.md A3)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import nn

from edgefl.contract.tensors import TensorSpec
from edgefl.models.spec import ModelSpec, sequential
from edgefl.submodels.importance.carrier import VALUES
from edgefl.submodels.importance.submodel import Importance, importance
from edgefl.wire.regions import extract
from edgefl.wire.tensors import Array, Arrays
from edgefl_server.aggregate.aggregator import Aggregator, layout_of
from edgefl_server.run_spec import Count
from tests.invariants.fiarse.tiny import vector
from tests.invariants.fiarse.training import LR, arrays_of, batches_of, client, simulate, small_net

Upload = tuple[Importance, Arrays]

NAME = "line.weight"
X = vector(1.0, -0.8, 0.5, 0.1)
A, B = (1.0, vector(0.1, 0.2, -0.1, 0.05)), (0.5, vector(0.3, 0.0, 9.0, 9.0))
"""(gamma, Delta = old - new) of the worked example; what B does not hold must not matter."""


def line(x: Array) -> ModelSpec:
    """A model that is one vector."""
    spec = ModelSpec(
        "line", sequential([("line", nn.Linear(len(x), 1, bias=False))]), TensorSpec((len(x),)), 2
    )
    spec.weights[NAME].copy_(torch.from_numpy(x))
    return spec


def averaged(old: Arrays, uploads: Sequence[Upload], count: Count = "holders") -> Arrays:
    """A round of the server: each update is checked and added against its tier's placement of this round."""
    base = old if count == "nonzero" else None
    aggregator = Aggregator(layout_of(old), weight_limit=len(uploads), device="cpu", base=base)
    for submodel, update in uploads:
        aggregator.add(aggregator.check(update, submodel.place(old, 1).regions), 1)
    return aggregator.result(old)


def round_of(x: Array, deltas: Sequence[tuple[float, Array]], count: Count = "holders") -> Array:
    """The new vector after these clients' updates."""
    spec = line(x)
    old, new = arrays_of(spec), []
    for gamma, delta in deltas:
        submodel = importance(spec, gamma=gamma)
        regions = submodel.place(old, 1).regions
        new.append((submodel, extract({NAME: (x - delta)[None]}, regions)))
    return averaged(old, new, count)[NAME][0]


# 19. Worked example


@pytest.mark.parametrize(
    ("count", "expected"),
    [("holders", [0.8, -0.9, 0.6, 0.05]), ("nonzero", [0.8, -1.0, 0.6, 0.05])],
)
def test_inv19_the_worked_example_by_both_rules(count: Count, expected: list[float]) -> None:
    np.testing.assert_allclose(round_of(X, [A, B], count), expected, rtol=1e-6)


def test_inv19_the_smaller_client_sends_two_values() -> None:
    placement = importance(line(X), gamma=0.5).place({NAME: X[None]}, 1)
    assert placement.regions[VALUES].positions.tolist() == [0, 1]  # type: ignore[union-attr]
    assert extract({NAME: X[None]}, placement.regions)[VALUES].tolist() == X[:2].tolist()


def test_inv19_an_entry_whose_every_change_is_zero_stays_by_both_rules() -> None:
    still = (1.0, vector(0.0, 0.0, 0.0, 0.0))
    for count in ("holders", "nonzero"):
        assert round_of(X, [still, still], count).tobytes() == X.tobytes()


# 20. Untrained parameters


@pytest.mark.parametrize("count", ["holders", "nonzero"])
def test_inv20_what_only_absent_clients_hold_keeps_its_bits(count: Count) -> None:
    new = round_of(X, [B], count)
    np.testing.assert_allclose(new[:2], [0.7, -0.8], rtol=1e-6)
    assert new[2:].tobytes() == X[2:].tobytes()


# 21. Sign


@pytest.mark.parametrize("count", ["holders", "nonzero"])
def test_inv21_a_single_full_client_s_weights_are_the_new_model_exactly(count: Count) -> None:
    spec = small_net()
    submodel, old = importance(spec, gamma=1.0), arrays_of(spec)
    trained = simulate(spec, {}, {}, batches_of(spec, 3), LR)
    update = {name: tensor.numpy() for name, tensor in trained.items()}
    new = averaged(old, [(submodel, update)], count)
    for name, value in update.items():
        assert np.abs(value - old[name]).max() > 1e-3
        # Sums have 42 bits behind the point, so float32 numbers of usual size come back in every bit.
        exact = np.abs(value) >= 2.0**-19
        assert np.array_equal(new[name][exact], value[exact])
        np.testing.assert_allclose(new[name], value, rtol=0, atol=2.0**-43)


def test_inv21_the_mean_of_weights_descends_along_the_mean_of_changes() -> None:
    deltas = [vector(0.1, 0.2, -0.1, 0.05), vector(0.3, -0.2, 0.5, 0.15)]
    new = round_of(X, [(1.0, delta) for delta in deltas])
    np.testing.assert_allclose(new, X - np.mean(deltas, axis=0), atol=1e-7)


# 22. FedAvg


def test_inv22_with_everybody_at_full_size_a_round_is_fedavg() -> None:
    spec = small_net()
    submodel, old = importance(spec, gamma=1.0), arrays_of(spec)
    device = client("torch", 1.0)
    uploads, plain = [], []
    for number in range(4):
        batches = batches_of(spec, 5, seed=number)
        *_, last = device.walk(device.begin(old), batches, LR)
        uploads.append((submodel, {name: tensor.numpy() for name, tensor in device.update(last).items()}))
        plain.append(simulate(spec, {}, {}, batches, LR))
    new = averaged(old, uploads)
    for name in old:
        mean = np.mean([weights[name].numpy() for weights in plain], axis=0, dtype=np.float64)
        np.testing.assert_allclose(new[name], mean, atol=1e-6)


# 23. Order and duplicates


@pytest.mark.parametrize("count", ["holders", "nonzero"])
def test_inv23_any_order_of_clients_gives_the_same_bits(count: Count) -> None:
    generator = np.random.default_rng(5)
    x = generator.normal(size=40).astype(np.float32)
    sizes = (0.1, 0.3, 0.3, 1.0)
    deltas = [
        (size, np.where(generator.random(40) < 0.3, 0, generator.normal(size=40)).astype(np.float32))
        for size in sizes
    ]
    results = {round_of(x, order, count).tobytes() for order in itertools.permutations(deltas)}
    assert len(results) == 1


def test_inv23_each_client_of_a_size_counts() -> None:
    alone, twice, thrice = (round_of(X, [A, *[B] * times])[0] for times in (1, 2, 3))
    np.testing.assert_allclose([alone, twice, thrice], [1 - 0.4 / 2, 1 - 0.7 / 3, 1 - 1.0 / 4], rtol=1e-6)
