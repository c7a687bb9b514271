"""FIARSE invariants 19 to 23: the server's partial average of submodels, by both rules of who counts (fiarse.md A3)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import nn

from edgefl.contract.tensors import TensorSpec
from edgefl.models.spec import ModelSpec, sequential
from edgefl.submodels.importance.carrier import VALUES
from edgefl.submodels.importance.submodel import Importance, importance
from edgefl.submodels.importance.thresholds import FIVE_SIZES, Mask
from edgefl.wire.regions import extract
from edgefl.wire.tensors import Array, Arrays
from edgefl_server.aggregate.aggregator import Aggregator, layout_of
from edgefl_server.run_spec import Count
from tests.invariants.fiarse.tiny import Vector, cut_vector, per_scalar_average, ring_average, vector
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
    ("count", "expected"), [("holders", [0.8, -0.9, 0.6, 0.05]), ("nonzero", [0.8, -1.0, 0.6, 0.05])]
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


# -- FIARSE invariants 24, 25 and 26: partial averaging of nested masks ------------------------------------


SIZES = (0.1, 0.3, 0.6)
"""Nobody holds the full model."""


def masks_of(x: Vector, sizes: tuple[float, ...] = SIZES) -> dict[float, Mask]:
    return {size: cut_vector(x, size)[1] for size in sizes}


def random_model(entries: int, seed: int = 0) -> Vector:
    return np.random.default_rng(seed).normal(size=entries).astype(np.float32)


def random_deltas(count: int, entries: int, seed: int = 1) -> list[Vector]:
    generator = np.random.default_rng(seed)
    return [generator.normal(scale=0.1, size=entries).astype(np.float32) for _ in range(count)]


# 24. Expectation over the choice of participants (Lemma C.1)


@pytest.mark.parametrize(("clients", "participants"), [(6, 2), (6, 3), (5, 1), (5, 5), (7, 4)])
def test_inv24_the_expected_step_of_a_ring(clients: int, participants: int) -> None:
    x = random_model(20)
    masks, deltas = masks_of(x), random_deltas(clients, 20)
    sizes = [SIZES[client % len(SIZES)] for client in range(clients)]
    subsets = list(itertools.combinations(range(clients), participants))
    steps = [
        x - per_scalar_average(x, masks, [(sizes[client], deltas[client]) for client in subset])
        for subset in subsets
    ]
    expected = np.mean(steps, axis=0, dtype=np.float64)

    inner = np.zeros(20, np.bool_)
    for size in SIZES:
        ring = masks[size] & ~inner
        holders = [client for client in range(clients) if sizes[client] >= size]
        missed = math.comb(clients - len(holders), participants) / math.comb(clients, participants)
        mean = np.mean([deltas[client] for client in holders], axis=0, dtype=np.float64)
        assert ring.any()
        np.testing.assert_allclose(expected[ring], (1 - missed) * mean[ring], atol=1e-6)
        inner = masks[size]
    assert not expected[~inner].any(), "beyond the largest capacity"


@pytest.mark.parametrize(("participants", "coefficient"), [(10, 0.95211), (20, 0.99850)])
def test_inv24_coefficients_of_the_paper_are_chances(participants: int, coefficient: float) -> None:
    missed = math.comb(75, participants) / math.comb(100, participants)
    assert f"{1 - missed:.5f}" == f"{coefficient:.5f}"
    # One entry that every holder moves by 1: the mean step over drawn rounds is the chance that one holds it.
    x, generator = vector(1.0, 0.1), np.random.default_rng(3)
    masks = masks_of(x, (0.5, 1.0))
    sizes = np.repeat([1.0, 0.5], [25, 75])
    drawn = [generator.choice(sizes, participants, replace=False) for _ in range(400)]
    steps = [
        x[1]
        - per_scalar_average(x, masks, [(float(size), vector(1.0, 1.0)) for size in sorted(set(round_))])[1]
        for round_ in drawn
    ]
    assert np.mean(steps) == pytest.approx(coefficient, abs=0.035)


# 25. Rings


@given(
    x=hnp.arrays(
        np.float32, st.integers(1, 40), elements=st.sampled_from([0.0, 0.5, -0.5, 1.0, -2.0, 0.125])
    ),
    capacities=st.lists(st.sampled_from(FIVE_SIZES), min_size=1, max_size=6),
    seed=st.integers(0, 99),
)
def test_inv25_averaging_by_rings_equals_averaging_by_entries(x, capacities, seed) -> None:
    deltas = random_deltas(len(capacities), len(x), seed)
    uploads = list(zip(capacities, deltas, strict=True))
    masks = masks_of(x, FIVE_SIZES)
    np.testing.assert_allclose(
        per_scalar_average(x, masks, uploads), ring_average(x, masks, uploads), rtol=1e-6, atol=1e-6
    )


# 26. Rings without a participant


@pytest.mark.parametrize("largest", [0, 1, 2])
def test_inv26_rings_beyond_the_largest_participant_do_not_change(largest: int) -> None:
    x, deltas = random_model(40), random_deltas(3, 40)
    masks = masks_of(x)
    present = SIZES[: largest + 1]
    averaged = per_scalar_average(x, masks, list(zip(present, deltas, strict=False)))
    held = masks[SIZES[largest]]
    assert averaged[~held].tobytes() == x[~held].tobytes()
    assert (averaged[held] != x[held]).all()
    assert int((~held).sum()) >= 16, "nobody holds the last ring"
