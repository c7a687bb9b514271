"""FIARSE's balanced partition (fiarse.md 4.2): equal sizes, and each client's own mix of classes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgefl.config import parse
from edgefl.data.equal import dirichlet_clients
from edgefl.data.partition import histograms
from edgefl.setup.data import open_data, partition
from tests.support.errors import DataError, refuses


def test_a_hundred_clients_have_mixes_as_skewed_as_drawn() -> None:
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 5000))
    parts = dirichlet_clients(labels, 100, alpha=0.3, seed=1)
    shares = histograms(labels, parts, 10) / 500

    assert {len(part) for part in parts} == {500}
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(50_000))
    # E sum p^2 of Dirichlet(a 1_C) is (a + 1) / (C a + 1): 0.325. Classes that run out make mixes a little more even.
    assert (shares**2).sum(axis=1).mean() == pytest.approx(1.3 / 4.0, abs=0.05)
    assert 0.0 < (shares == 0.0).mean() < 0.5


@given(st.integers(1, 30), st.integers(0, 2**32 - 1), st.sampled_from([1e-6, 0.1, 1.0, 100.0]))
def test_every_row_is_used_once_and_sizes_are_equal(clients: int, seed: int, alpha: float) -> None:
    labels = np.random.default_rng(seed).integers(0, 7, 200) ** 2
    parts, again = (dirichlet_clients(labels, clients, alpha=alpha, seed=seed) for _ in range(2))

    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(200))
    assert np.ptp([len(part) for part in parts]) <= 1
    assert all(np.array_equal(one, other) for one, other in zip(parts, again, strict=True))


def test_a_large_alpha_gives_alike_clients_and_a_small_one_few_classes() -> None:
    labels = np.repeat(np.arange(10), 1000)
    alike, apart = (
        histograms(labels, dirichlet_clients(labels, 20, alpha=a, seed=2), 10) for a in (1e4, 0.01)
    )

    assert alike.min() > 20 and (apart > 0).sum(axis=1).mean() < 4


def test_it_is_asked_for_in_a_file_and_refused_where_it_cannot_be() -> None:
    tables = {"data": {"name": "digits", "partition": "dirichlet_clients", "alpha": 0.5}}
    federation = parse(tables, source="a test")
    assert sorted({*map(len, partition(federation, open_data(federation), 10))}) == [143, 144]
    with refuses(DataError, samples=3, clients=4):
        dirichlet_clients(np.arange(3), 4, alpha=1.0, seed=0)
    with refuses(DataError, alpha=0.0):
        dirichlet_clients(np.arange(3), 2, alpha=0.0, seed=0)
