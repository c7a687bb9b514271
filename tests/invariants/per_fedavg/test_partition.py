"""Per-FedAvg invariant 28: the ten groups of per_fedavg.md 3.2, and what of a federation file asks for them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgefl.config import Federation, parse
from edgefl.data.dataset import Array, Dataset
from edgefl.data.groups import groups, largest_a
from edgefl.data.partition import histograms, match_shares
from edgefl.setup.data import held_out, partition
from tests.support.errors import ConfigError, DataError, refuses

# Training samples of MNIST's digits 0 to 9.
MNIST = (5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949)


def labels_of(*counts: int) -> Array:
    """Shuffled labels 0 .. 9, this many of each."""
    return np.random.default_rng(0).permutation(np.repeat(np.arange(10), counts))


def balanced(each: int) -> Array:
    return labels_of(*[each] * 10)


def expected(per_group: int, a: int, single_class: bool) -> Array:
    """The table of 3.2, written out."""
    half_a = [[a] * 5 + [0] * 5] * 5
    half_b = [
        [0 if single_class else (a // 2) * (group == c) for c in range(5)]
        + [2 * a * (group == c) for c in range(5)]
        for group in range(5)
    ]
    return np.repeat(np.array(half_a + half_b), per_group, axis=0)


@given(st.integers(1, 4), st.integers(1, 6), st.booleans(), st.integers(0, 2**32 - 1))
def test_28_users_have_their_groups_classes(per_group: int, half: int, single_class: bool, seed: int) -> None:
    a = 2 * half
    labels = balanced(11 * per_group * half + 3)
    parts = groups(labels, 10 * per_group, a=a, single_class=single_class, seed=seed)
    assert np.array_equal(histograms(labels, parts, 10), expected(per_group, a, single_class))
    rows = np.concatenate(parts)
    assert len(np.unique(rows)) == len(rows)
    again = groups(labels, 10 * per_group, a=a, single_class=single_class, seed=seed)
    assert all(np.array_equal(own, other) for own, other in zip(parts, again, strict=True))


def test_28_the_paper_s_numbers_of_images_per_class_and_user() -> None:
    labels = balanced(6000)
    for a, user, other, single, first, second in (
        (196, 980, 490, 392, 5390, 1960),
        (68, 340, 170, 136, 1870, 680),
    ):
        table = histograms(labels, groups(labels, 50, a=a, seed=1), 10)
        assert set(table.sum(axis=1)[:25]) == {user} and set(table.sum(axis=1)[25:]) == {other}
        assert table.sum(axis=0).tolist() == [first] * 5 + [second] * 5
        assert first == 27.5 * a and second == 10 * a
        variant = histograms(labels, groups(labels, 50, a=a, single_class=True, seed=1), 10)
        assert set(variant.sum(axis=1)[25:]) == {single} and np.all((variant[25:] > 0).sum(axis=1) == 1)


@pytest.mark.parametrize(
    ("counts", "order", "largest"),
    [
        (MNIST, None, 212),
        (MNIST, (1, 2, 3, 4, 5, 6, 7, 8, 9, 0), 196),
        ((6000,) * 10, None, 218),
        ((5000,) * 10, None, 180),
        ((1000,) * 10, None, 36),
    ],
)
def test_28_the_largest_a_that_datasets_allow(
    counts: tuple[int, ...], order: tuple[int, ...] | None, largest: int
) -> None:
    labels = labels_of(*counts)
    assert largest_a(labels, 50, order=order) == largest
    assert len(groups(labels, 50, seed=0, order=order)[0]) == 5 * largest, "0 takes the largest"
    with refuses(DataError, a=..., largest=largest, clients=50):
        groups(labels, 50, a=largest + 2, seed=0, order=order)


def test_28_the_other_five_classes_limit_a_too() -> None:
    labels = labels_of(*[600] * 5, *[95] * 5)
    assert largest_a(labels, 10) == 46  # 2 a of each: 92 of 95
    assert largest_a(labels, 20) == 22


@pytest.mark.parametrize(
    ("labels", "clients", "a", "message"),
    [
        (balanced(100), 10, 3, "a = 3 samples of a class: a is even"),
        (balanced(100), 10, -2, "a is even"),
        (balanced(100), 25, 2, "found 25 devices: take a multiple of ten"),
        (balanced(100), 0, 2, "multiple of ten"),
        (balanced(5), 10, 0, "take fewer devices or more samples"),
        (np.arange(9).repeat(50), 10, 2, "ten classes"),
    ],
)
def test_28_an_impossible_partition_says_so(labels: Array, clients: int, a: int, message: str) -> None:
    with pytest.raises(DataError, match=message):
        groups(labels, clients, a=a, seed=0)


def _federation(**data: Any) -> Federation:
    return parse({"data": {"partition": "groups", **data}, "federation": {"seed": 3}}, source="a test")


def _dataset(train: Array, test: Array) -> Dataset:
    x = np.zeros((len(train) + len(test), 1, 2, 2), np.uint8)
    return Dataset("flat", x[: len(train)], train, x[: len(test)], test, 1.0, 0.0, 10)


def test_28_a_federation_file_names_a_the_variant_and_the_test_shards() -> None:
    dataset = _dataset(balanced(300), balanced(60))
    for single_class in (False, True):
        told = {"group_samples": 20, "group_test_samples": 4, "single_class": single_class}
        federation = _federation(**told)
        parts = partition(federation, dataset, 20)
        assert np.array_equal(histograms(dataset.train_y, parts, 10), expected(2, 20, single_class))
        tests = held_out(federation, dataset, parts)
        assert np.array_equal(histograms(dataset.test_y, tests, 10), expected(2, 4, single_class))
        assert len(np.unique(np.concatenate(tests))) == sum(map(len, tests))
    with refuses(ConfigError, keys=["data.group_samples"]):
        _federation(group_samples=7)


def test_test_shards_keep_the_classes_proportions() -> None:
    dataset = _dataset(balanced(200), balanced(60))
    for name in ("dirichlet", "labels", "iid", "paired"):
        federation = parse({"data": {"partition": name}}, source="a test")
        parts = partition(federation, dataset, 8)
        wanted = histograms(dataset.train_y, parts, 10)
        tests = held_out(federation, dataset, parts)
        assert len(np.unique(np.concatenate(tests))) == sum(map(len, tests))
        assert np.abs(histograms(dataset.test_y, tests, 10) - 0.3 * wanted).max() <= 1


def test_a_test_set_too_small_for_all_users_says_so() -> None:
    wanted = np.array([[1, 0], [99, 0], [0, 100]])
    with refuses(DataError, clients=3, empty=(0,)):
        match_shares(np.repeat([0, 1], 10), wanted, seed=0)
