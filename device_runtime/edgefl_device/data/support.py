"""Split of samples into support (adapts a model) and query (evaluates it), and the batches of each adaptation step.

All functions are pure functions of (seed, user): they return the same rows and noise on a device, on a server and for
every compared method. Their random streams are separate from those of training.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.random import Generator, Philox, SeedSequence

from edgefl.errors import ConfigError, DataError
from edgefl.wire.tensors import Array

Protocol = Literal["train_support", "split_test", "paper_literal"]

NOTES: Mapping[Protocol, str] = {
    "train_support": "adapted to training samples, judged on test samples: a user who took part",
    "split_test": "adapted to one half of the test samples, judged on the other: a user who is new",
    "paper_literal": "LEAKS: adapted to test samples that also judge it, as the paper's words have it; for comparison only",
}
"""What a result under each protocol says; for every report."""

HELD_OUT = 0.2
"""Share of the local samples that judge where there are no test samples."""

_HALF = 0.5
# Training counts its streams from 0; these keys begin with a number that none of them has.
_PERSONAL = 1 << 30
_SPLIT, _ROWS, _NOISE = range(3)


@dataclass(frozen=True, eq=False)
class SampleShards:
    """Row numbers (int64) of one user's training and test samples in a pool; the two are disjoint."""

    train: Array
    test: Array


@dataclass(frozen=True, eq=False)
class SupportSplit:
    """Row numbers of a pool: batches are drawn from ``support``, metrics are computed on ``query``."""

    protocol: Protocol
    support: Array
    query: Array

    @property
    def leaks(self) -> bool:
        """True if support and query overlap, so that the metrics do not describe new data."""
        return bool(np.isin(self.support, self.query).any())


def checked_protocol(name: str) -> Protocol:
    """Return ``name`` if it is an evaluation protocol.

    Raises:
        ConfigError: ``name`` is no protocol; the text lists the protocols.
    """
    for known in NOTES:
        if name == known:
            return known
    raise ConfigError(f"no protocol {name!r}; there are: {', '.join(get_args(Protocol))}", protocol=name)


def split(
    protocol: Protocol, shards: SampleShards, labels: Array, *, seed: int, user: int = 0
) -> SupportSplit:
    """Return support and query rows of a user.

    Args:
        protocol: ``train_support`` uses the train shard as support and the test shard as query. ``split_test`` uses
            stratified halves of the test shard, the larger one as support. ``paper_literal`` uses the test shard as
            both.
        shards: The user's rows in the pool.
        labels: Labels of the whole pool.
        seed: Seed of the split.
        user: Number of the user.

    Raises:
        DataError: Support or query would be empty.
    """
    if protocol == "split_test":
        halves = _halves(shards.test, labels, _HALF, _generator(seed, user, _SPLIT))
        return SupportSplit(protocol, *halves)
    support = shards.train if protocol == "train_support" else shards.test
    for rows, what in ((support, "training"), (shards.test, "test")):
        if not len(rows):
            raise DataError(
                f"protocol {protocol} needs {what} samples, and user {user} has none: add some, or choose another protocol",
                protocol=protocol,
                user=user,
            )
    return SupportSplit(protocol, support, shards.test)


def held_out(labels: Array, *, seed: int, user: int = 0, share: float = HELD_OUT) -> SampleShards:
    """Return all rows of ``labels`` as shards, with a stratified ``share`` of them (at least one) as test shard.

    The choice is a pure function of ``labels``, ``seed``, ``user`` and ``share``.

    Raises:
        DataError: There are fewer than two rows.
    """
    train, test = _halves(np.arange(len(labels)), labels, share, _generator(seed, user, _SPLIT))
    return SampleShards(train, test)


def batch_rows(samples: int, size: int, step: int, *, seed: int, user: int = 0, clip: bool = False) -> Array:
    """Return row positions (int64) of the batch of step ``step``, drawn without replacement and independent of other
    steps.

    Args:
        samples: Number of support rows.
        size: Rows of a batch.
        step: Number of the adaptation step.
        seed: Seed of the draw.
        user: Number of the user.
        clip: With fewer than ``size`` samples, True returns all of them in random order. False draws ``size`` with
            replacement, for graphs with a fixed batch size.
    """
    most = min(size, samples) if clip else size
    rows = _generator(seed, user, _ROWS, step).choice(samples, most, replace=samples < most)
    return np.asarray(rows, np.int64)


def uniform(shape: tuple[int, ...], step: int, port: int, *, seed: int, user: int = 0) -> Array:
    """Return uniform [0, 1) values, float32, for noise input number ``port`` of adaptation step ``step``: a pure
    function of all arguments.
    """
    return np.asarray(_generator(seed, user, _NOISE, step, port).random(shape, dtype=np.float32))


def majority(labels: Array, support: Array, query: Array) -> float | None:
    """Return the accuracy on ``query`` of always predicting the most frequent class of ``support``.

    Ties use the smallest class. Return None if labels are not one class number each.
    """
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
        return None
    return float((labels[query] == np.bincount(labels[support]).argmax()).mean())


def _halves(rows: Array, labels: Array, share: float, generator: Generator) -> tuple[Array, Array]:
    """Return (first part, second part) of ``rows``, sorted and non-empty; the second has about ``share`` of each class.
    DataError below two rows.
    """
    if len(rows) < 2:
        raise DataError(
            f"{len(rows)} samples cannot be split into some to adapt to and some to judge by: give at least 2, or choose "
            "another protocol",
            samples=len(rows),
        )
    own = labels[rows]
    classes = own if own.ndim == 1 and np.issubdtype(own.dtype, np.integer) else np.zeros(len(own), np.int64)
    _, members = np.unique(classes, return_inverse=True)
    wanted = np.bincount(members) * share
    counts = np.floor(wanted).astype(np.int64)
    # Whole numbers first, then one more for the classes that came out shortest.
    total = min(max(1, int(len(rows) * share)), len(rows) - 1)
    shortest = np.argsort(counts - wanted, kind="stable")
    counts[shortest[: max(0, total - int(counts.sum()))]] += 1
    second = np.concatenate(
        [
            generator.permutation(np.flatnonzero(members == place))[:count]
            for place, count in enumerate(counts)
        ]
    )
    chosen = np.zeros(len(rows), bool)
    chosen[second] = True
    return np.sort(rows[~chosen]), np.sort(rows[chosen])


def _generator(seed: int, user: int, *key: int) -> Generator:
    return Generator(Philox(SeedSequence((_PERSONAL, seed, user, *key))))
