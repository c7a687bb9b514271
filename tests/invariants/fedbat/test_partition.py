"""FedBAT's partitions (fedbat.md 4.2, 7): disjoint, covering, few labels to a client, and reproducible."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgefl.config import Federation, parse
from edgefl.data.dataset import Array, Dataset
from edgefl.data.partition import by_labels, dirichlet, histograms
from edgefl.setup.data import partition
from tests.support.errors import ConfigError, DataError, refuses


@st.composite
def ownable(draw: st.DrawFn) -> tuple[Array, int, int, int]:
    """Shuffled labels, clients, labels per client, a seed: such that the labels can all be owned."""
    classes, clients, seed = (
        draw(st.integers(1, 12)),
        draw(st.integers(1, 25)),
        draw(st.integers(0, 2**32 - 1)),
    )
    per_client = draw(st.integers(-(-classes // clients), classes))
    counts = draw(st.lists(st.integers(clients, 3 * clients), min_size=classes, max_size=classes))
    # Gaps in the numbers, as where a subset of a dataset has lost a class.
    labels = np.random.default_rng(seed).permutation(np.repeat(3 * np.arange(classes), counts))
    return labels, clients, per_client, seed


@given(ownable())
def test_labels_partition_is_a_disjoint_cover_of_few_labels_each(case: tuple[Array, int, int, int]) -> None:
    labels, clients, per_client, seed = case
    parts = by_labels(labels, clients, per_client=per_client, seed=seed)
    assert len(parts) == clients
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(len(labels)))
    held = [np.unique(labels[part]) for part in parts]
    assert all(len(own) == per_client for own in held), "every class has a row for each of its owners"
    known = np.unique(labels)
    assert all(known[client % len(known)] in own for client, own in enumerate(held))


@given(ownable())
def test_labels_partition_divides_each_class_evenly(case: tuple[Array, int, int, int]) -> None:
    labels, clients, per_client, seed = case
    parts = by_labels(labels, clients, per_client=per_client, seed=seed)
    for column in histograms(labels, parts, 3 * 12).T:
        shares = column[column > 0]
        assert not len(shares) or shares.max() - shares.min() <= 1


@given(ownable())
def test_labels_partition_is_decided_by_its_seed(case: tuple[Array, int, int, int]) -> None:
    labels, clients, per_client, seed = case
    first, again = (by_labels(labels, clients, per_client=per_client, seed=seed) for _ in range(2))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))


def test_labels_partition_changes_with_its_seed_in_labels_and_in_rows() -> None:
    labels = np.repeat(np.arange(10), 300)
    first, other = (by_labels(labels, 20, per_client=3, seed=seed) for seed in (0, 1))
    held = [[tuple(np.unique(labels[part])) for part in parts] for parts in (first, other)]
    assert held[0] != held[1]
    single = [by_labels(labels, 10, per_client=1, seed=seed) for seed in (0, 1)]
    assert all(np.array_equal(a, b) for a, b in zip(*single, strict=True)), "one owner has the whole class"
    pair = [by_labels(labels, 20, per_client=1, seed=seed) for seed in (0, 1)]
    assert any(not np.array_equal(a, b) for a, b in zip(*pair, strict=True)), "rows are dealt at random"


@pytest.mark.parametrize(("classes", "per_client", "clients"), [(10, 3, 30), (10, 3, 100), (100, 10, 100)])
def test_labels_partition_of_the_paper_s_settings(classes: int, per_client: int, clients: int) -> None:
    labels = np.tile(np.arange(classes), 6_000 // classes * 10)
    table = histograms(labels, by_labels(labels, clients, per_client=per_client, seed=5), classes)
    assert np.all((table > 0).sum(axis=1) == per_client)
    assert np.array_equal(table.sum(axis=0), np.bincount(labels))


def test_labels_partition_draws_the_other_labels_evenly() -> None:
    labels = np.repeat(np.arange(10), 4_000)
    owners = (histograms(labels, by_labels(labels, 2_000, per_client=3, seed=0), 10) > 0).sum(axis=0)
    # 200 each by turn, and 2 of 9 of the other 1,800: binomial, standard deviation 18.
    assert np.all(np.abs(owners - 600) < 5 * 18)


def test_labels_partition_that_cannot_be_says_what_to_change() -> None:
    labels = np.repeat(np.arange(10), 20)
    with refuses(DataError, labels=10, clients=4, per_client=2):
        by_labels(labels, 4, per_client=2, seed=0)
    with refuses(DataError, labels=10, clients=30, per_client=11):
        by_labels(labels, 30, per_client=11, seed=0)
    with refuses(DataError, clients=6, per_client=1):
        by_labels(np.array([0, 1, 1, 1, 1, 1]), 6, per_client=1, seed=0)
    with refuses(DataError, samples=200, clients=201):
        by_labels(labels, 201, per_client=3, seed=0)


def _federation(seed: int = 4, **data: object) -> Federation:
    return parse({"data": data, "federation": {"seed": seed}}, source="a test")


def _dataset(labels: Array) -> Dataset:
    x = np.zeros((len(labels), 1, 2, 2), np.uint8)
    return Dataset("flat", x, labels, x[:1], labels[:1], 1.0, 0.0, int(labels.max()) + 1)


def test_a_federation_file_asks_for_three_labels_unless_it_says_how_many() -> None:
    labels = np.repeat(np.arange(10), 100)
    for told, expected in (({}, 3), ({"labels_per_device": 2}, 2)):
        parts = partition(_federation(partition="labels", **told), _dataset(labels), 12)
        assert {len(np.unique(labels[part])) for part in parts} == {expected}
    with refuses(ConfigError, keys=["data.labels_per_device"]):
        _federation(partition="labels", labels_per_device=0)


def test_dirichlet_is_drawn_again_until_each_device_has_ten_samples() -> None:
    labels, least = np.repeat(np.arange(10), 200), []
    for seed in range(5):
        once = dirichlet(labels, 20, alpha=0.15, seed=seed)
        least.append(min(len(part) for part in once))
        parts = partition(_federation(seed, alpha=0.15), _dataset(labels), 20)
        assert min(len(part) for part in parts) >= 10
        assert (least[-1] < 10) != all(np.array_equal(a, b) for a, b in zip(once, parts, strict=True))
    assert min(least) < 10 <= max(least), "some first draws must do and some not, else nothing was asked here"


def test_dirichlet_goes_on_with_fewer_where_ten_samples_each_cannot_be() -> None:
    parts = partition(_federation(alpha=5.0), _dataset(np.repeat(np.arange(4), 10)), 5)
    assert 2 <= min(len(part) for part in parts) < 10
    with refuses(DataError, clients=9, alpha=0.001):
        partition(_federation(alpha=0.001), _dataset(np.repeat(np.arange(2), 10)), 9)
