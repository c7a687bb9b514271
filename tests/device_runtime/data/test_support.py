"""Which samples a model is adapted to and which judge it."""

from __future__ import annotations

import numpy as np
import pytest

from edgefl.errors import ConfigError, DataError
from edgefl_device.data.support import (
    UserShards,
    batch_rows,
    checked_protocol,
    held_out,
    majority,
    split,
    uniform,
)


@pytest.mark.parametrize("counts", [(10, 10), (7, 5, 3), (1, 1, 1, 1), (20, 1), (1, 1)])
def test_halves_are_stratified(counts: tuple[int, ...]) -> None:
    labels = np.repeat(np.arange(len(counts)), counts)
    shards = UserShards(np.arange(0), np.arange(len(labels)))

    parts = split("split_test", shards, labels, seed=1)

    for label, count in enumerate(counts):
        halves = [int((labels[rows] == label).sum()) for rows in (parts.support, parts.query)]
        assert sum(halves) == count
        assert abs(halves[0] - halves[1]) <= 1
    assert 0 <= len(parts.support) - len(parts.query) <= 1


def test_labels_that_are_no_classes_are_halved_too() -> None:
    labels = np.random.default_rng(0).normal(size=(9, 2))

    parts = split("split_test", UserShards(np.arange(0), np.arange(9)), labels, seed=1)

    assert (len(parts.support), len(parts.query)) == (5, 4)
    assert majority(labels, parts.support, parts.query) is None


def test_one_held_out_sample_is_the_least() -> None:
    shards = held_out(np.zeros(3, np.int64), seed=0)

    assert (len(shards.train), len(shards.test)) == (2, 1)


@pytest.mark.parametrize("samples", [0, 1])
def test_what_cannot_be_split_is_refused(samples: int) -> None:
    labels = np.zeros(samples, np.int64)

    with pytest.raises(DataError, match="at least 2"):
        held_out(labels, seed=0)
    with pytest.raises(DataError, match="at least 2"):
        split("split_test", UserShards(np.arange(0), np.arange(samples)), labels, seed=0)


@pytest.mark.parametrize(("train", "test", "missing"), [(0, 3, "training"), (3, 0, "test")])
def test_an_empty_shard_is_named(train: int, test: int, missing: str) -> None:
    shards = UserShards(np.arange(train), np.arange(train, train + test))

    with pytest.raises(DataError, match=f"needs {missing} samples"):
        split("train_support", shards, np.zeros(3, np.int64), seed=0)


def test_an_unknown_protocol_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match="train_support, split_test, paper_literal"):
        checked_protocol("holdout")


def test_a_batch_has_no_row_twice_while_there_are_enough() -> None:
    assert len(set(batch_rows(30, 20, 0, seed=0).tolist())) == 20


def test_few_samples_fill_a_batch_of_fixed_size_with_repetitions() -> None:
    rows = batch_rows(3, 20, 0, seed=0)

    assert len(rows) == 20
    assert set(rows.tolist()) <= {0, 1, 2}
    assert sorted(batch_rows(3, 20, 0, seed=0, clip=True).tolist()) == [0, 1, 2]


def test_steps_users_and_seeds_have_streams_of_their_own() -> None:
    keys = [(seed, user, step) for seed in (0, 1) for user in (0, 1) for step in (0, 1)]

    rows = {tuple(batch_rows(100, 20, step, seed=seed, user=user)) for seed, user, step in keys}
    noise = {uniform((4,), step, 0, seed=seed, user=user).tobytes() for seed, user, step in keys}

    assert len(rows) == len(noise) == len(keys)
    assert np.array_equal(batch_rows(100, 20, 1, seed=1), batch_rows(100, 20, 1, seed=1))


def test_a_constant_answer_is_the_most_frequent_class_of_the_support() -> None:
    labels = np.array([0, 1, 1, 2, 2, 1, 2, 0])

    assert majority(labels, np.arange(5), np.arange(5, 8)) == pytest.approx(1 / 3)
