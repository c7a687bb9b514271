"""EmbracingFL I17: the partition is a disjoint cover, reproducible, and more skewed for smaller alpha."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgefl.data.dataset import Array
from edgefl.data.datasets import load
from edgefl.data.partition import dirichlet, histograms, iid
from tests.support.errors import DataError, refuses


@pytest.fixture(scope="module")
def labels() -> Array:
    """Labels of Fashion-MNIST where its files are found, else of scikit-learn's digits."""
    return load("auto").train_y


@given(
    clients=st.integers(1, 20),
    alpha=st.sampled_from([0.1, 0.5, 1.0, 100.0]),
    seed=st.integers(0, 2**32 - 1),
    counts=st.lists(st.integers(20, 60), min_size=1, max_size=6),
)
def test_i17_every_sample_is_used_once(clients: int, alpha: float, seed: int, counts: list[int]) -> None:
    labels = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(counts)), counts))
    try:
        parts = dirichlet(labels, clients, alpha=alpha, seed=seed, redraws=50)
    except DataError:
        assert alpha < 100.0 or len(labels) < 10 * clients, (
            "only skew or few samples may leave a client empty"
        )
        parts = iid(labels, clients, seed=seed)
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(len(labels)))
    assert min(len(part) for part in parts) >= 1


def test_i17_the_paper_s_partition_of_real_labels(labels: Array) -> None:
    clients = 128 if len(labels) > 10_000 else 16
    parts = dirichlet(labels, clients, alpha=0.1, seed=7)
    table = histograms(labels, parts, 10)
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(len(labels)))
    assert np.array_equal(table.sum(axis=0), np.bincount(labels))
    assert np.array_equal(table.sum(axis=1), [len(part) for part in parts])
    assert min(len(part) for part in parts) >= 1


def test_i17_equal_seeds_give_equal_partitions_and_others_differ(labels: Array) -> None:
    first, again, other = (dirichlet(labels, 8, alpha=0.5, seed=seed) for seed in (3, 3, 4))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert any(not np.array_equal(a, b) for a, b in zip(first, other, strict=True))


def test_i17_smaller_alpha_is_more_skewed(labels: Array) -> None:
    skews = [
        np.mean([_skew(labels, dirichlet(labels, 16, alpha=alpha, seed=seed)) for seed in range(5)])
        for alpha in (100.0, 1.0, 0.1)
    ]
    assert skews == sorted(skews)
    assert skews[2] > 2 * skews[0]
    assert _skew(labels, iid(labels, 16, seed=0)) < skews[1]


def _skew(labels: Array, parts: list[Array]) -> float:
    """Mean share of a client's most frequent label."""
    table = histograms(labels, parts, 10)
    return float((table.max(axis=1) / table.sum(axis=1)).mean())


def test_i17_iid_parts_have_almost_equal_sizes(labels: Array) -> None:
    sizes = [len(part) for part in iid(labels, 7, seed=0)]
    assert max(sizes) - min(sizes) <= 1


def test_i17_an_impossible_partition_ends_with_a_clear_message() -> None:
    with refuses(DataError, clients=6, alpha=0.01):
        dirichlet(np.zeros(6, np.int64), 6, alpha=0.01, seed=0, redraws=20)
    with refuses(DataError, samples=3, clients=4):
        iid(np.zeros(3, np.int64), 4, seed=0)
