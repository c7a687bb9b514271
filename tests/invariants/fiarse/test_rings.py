"""FIARSE invariants 20, 24, 25 and 26: partial averaging of nested masks."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from edgefl.submodels.importance.thresholds import FIVE_SIZES, Mask
from tests.invariants.fiarse.tiny import Vector, cut_vector, per_scalar_average, ring_average, vector

SIZES = (0.1, 0.3, 0.6)
"""Nobody holds the full model."""


def masks_of(x: Vector, sizes: tuple[float, ...] = SIZES) -> dict[float, Mask]:
    return {size: cut_vector(x, size)[1] for size in sizes}


def random_model(entries: int, seed: int = 0) -> Vector:
    return np.random.default_rng(seed).normal(size=entries).astype(np.float32)


def random_deltas(count: int, entries: int, seed: int = 1) -> list[Vector]:
    generator = np.random.default_rng(seed)
    return [generator.normal(scale=0.1, size=entries).astype(np.float32) for _ in range(count)]


# 20. Untrained parameters


def test_inv20_entries_that_no_participant_holds_are_bit_identical() -> None:
    x = vector(1.0, -0.8, 0.5, 0.1)
    masks = masks_of(x, (0.5, 1.0))
    assert np.flatnonzero(masks[0.5]).tolist() == [0, 1]
    averaged = per_scalar_average(x, masks, [(0.5, vector(0.3, 0.0, 9.0, 9.0))])
    np.testing.assert_allclose(averaged, [0.7, -0.8, 0.5, 0.1], rtol=1e-6)
    assert averaged[2:].tobytes() == x[2:].tobytes()


def test_inv20_with_a_full_client_beside_it_everything_moves() -> None:
    x = vector(1.0, -0.8, 0.5, 0.1)
    uploads = [(1.0, vector(0.1, 0.2, -0.1, 0.05)), (0.5, vector(0.3, 0.0, 9.0, 9.0))]
    averaged = per_scalar_average(x, masks_of(x, (0.5, 1.0)), uploads)
    np.testing.assert_allclose(averaged, [0.8, -0.9, 0.6, 0.05], rtol=1e-6)


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


def test_inv25_the_order_of_participants_does_not_matter() -> None:
    x, deltas = random_model(50), random_deltas(3, 50)
    masks = masks_of(x)
    uploads = list(zip(SIZES, deltas, strict=True))
    averages = [per_scalar_average(x, masks, list(order)) for order in itertools.permutations(uploads)]
    assert all(np.allclose(averages[0], other, rtol=0, atol=1e-7) for other in averages)


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
