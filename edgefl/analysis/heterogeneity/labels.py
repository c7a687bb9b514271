"""Dissimilarity of users' labels and inputs: total variation and Wasserstein distances."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import linear_sum_assignment  # type: ignore[import-untyped]

from edgefl.data.dataset import Array
from edgefl.errors import DataError


@dataclass(frozen=True, eq=False)
class LabelReport:
    """Label frequencies of n users, weighed equally (per_fedavg.md 6.6 a).

    Under the 0/1 metric on labels, the total variations are the 1-Wasserstein distances too. They are the users' whole
    difference if users share p(x|y), else a lower bound of it.

    Attributes:
        frequencies: class frequencies per user, (n, classes).
        p: their mean, (classes,).
        tv: total variation of each user from ``p``, (n,).
        pairwise: total variation between users, (n, n).
        ordered_w1: 1-Wasserstein distance of each user from ``p`` for labels on a line, |y - y'| apart, (n,).
    """

    frequencies: Array
    p: Array
    tv: Array
    pairwise: Array
    ordered_w1: Array

    @property
    def mean_tv2(self) -> float:
        """(1/n) sum TV_i^2. gamma_G^2 is at most 4 B^2 times it, gamma_H^2 at most 4 L^2 times it (eq. 14).

        B and L bound the gradient and Hessian of every single sample. A report has only the largest norms of batch
        gradients and user Hessians, with which the products are estimates instead of bounds.
        """
        return float((self.tv**2).mean())

    @property
    def mean_pairwise(self) -> float:
        """Mean total variation over all n^2 ordered pairs of users, each user paired with itself too."""
        return float(self.pairwise.mean())


def label_report(counts: Array) -> LabelReport:
    """Measure the dissimilarity of users' labels.

    Args:
        counts: samples per user and class, (n, classes).

    Returns:
        Frequencies and distances.

    Raises:
        DataError: if a user has no sample.
    """
    frequencies = frequencies_of(counts)
    p = frequencies.mean(axis=0)
    return LabelReport(
        frequencies=frequencies,
        p=p,
        tv=total_variation(frequencies, p),
        pairwise=np.stack([total_variation(frequencies, own) for own in frequencies]),
        ordered_w1=np.abs(np.cumsum(frequencies - p, axis=1))[:, :-1].sum(axis=1),
    )


def frequencies_of(counts: Array) -> Array:
    """Return each user's class frequencies, (n, classes).

    Args:
        counts: samples per user and class, (n, classes).

    Returns:
        Rows that sum to 1.

    Raises:
        DataError: if a user has no sample.
    """
    totals = counts.sum(axis=1, keepdims=True)
    empty = np.flatnonzero(totals[:, 0] == 0)
    if not len(counts) or len(empty):
        raise DataError(
            f"users need a sample each, found {len(counts)} users, {len(empty)} of them without: use fewer users",
            empty=tuple(map(int, empty)),
        )
    return np.asarray(counts / totals)


def mean_pairwise(frequencies: Array) -> float:
    """Return the mean total variation distance between two users, for class frequencies (n, classes) of n users.

    Equal to :attr:`LabelReport.mean_pairwise`, but without a table of all pairs. Frequencies of a class are sorted:
    the k-th of n is subtracted from n - 1 - k larger ones, and k smaller ones from it.
    """
    users = len(frequencies)
    signs = 2.0 * np.arange(users) - users + 1.0
    return float((signs[:, None] * np.sort(frequencies, axis=0)).sum()) / users**2


def total_variation(first: Array, second: Array) -> Array:
    """Return the total variation 1/2 sum |q1 - q2| between the distributions in the last dimension of ``first`` and
    ``second``.
    """
    return np.asarray(0.5 * np.abs(first - second).sum(axis=-1))


def majority_levels(counts: Array) -> tuple[float, float]:
    """Return the accuracy of always predicting a user's most frequent class: (mean over users, mean over samples).

    See per_fedavg.md 4.4; ``counts`` are samples per user and class, (n, classes).
    """
    most, totals = counts.max(axis=1), counts.sum(axis=1)
    return float((most / totals).mean()), float(most.sum() / totals.sum())


def group_users(counts: Array) -> dict[tuple[int, ...], list[int]]:
    """Group users by the classes of which they have samples.

    Args:
        counts: samples per user and class, (n, classes).

    Returns:
        The numbers of the users, by the ascending tuple of their classes. Groups are in order of their first
        user.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for user, row in enumerate(counts):
        groups.setdefault(tuple(int(label) for label in np.flatnonzero(row)), []).append(user)
    return groups


DIRECTIONS, ROWS, ALL_ROWS, MATCHED = 64, 64, 4096, 64
"""Number of random projections; largest numbers of samples of a user, of all users, and of a user in a matching."""


@dataclass(frozen=True, eq=False)
class WassersteinDistances:
    """1-Wasserstein distance of each user's inputs from the mixture of all users, estimated in three ways.

    Attributes:
        per_feature: mean over the single features, (n,).
        sliced: mean over random directions, (n,).
        matched: cost of an exact matching of samples, (n,).
    """

    per_feature: Array
    sliced: Array
    matched: Array


@dataclass(frozen=True, eq=False)
class FeatureReport:
    """Distances between users' inputs. Only the excess of ``found`` over ``chance`` is heterogeneity.

    Attributes:
        found: distances of the users' own samples.
        chance: the same after a shuffle of samples across users.
        features: number of features of a sample.
        rows: number of samples that were drawn of all users together.
    """

    found: WassersteinDistances
    chance: WassersteinDistances
    features: int
    rows: int


def feature_report(users: Sequence[Array], *, seed: int = 0) -> FeatureReport:
    """Measure the dissimilarity of users' inputs.

    The mean over features is exact one-dimensional W1; the mean over random unit directions (sliced W1) is a lower
    bound of W1 in all dimensions. Matching equally many samples of a user and of all others is an upper bound, which
    decreases slowly with the number of samples. All three are positive for equal users, hence the same measurement
    after a shuffle.

    Args:
        users: the users' inputs, (m_i, features) each, of which at most :data:`ROWS` are drawn at random.
        seed: seed of the draws.

    Returns:
        The distances before and after a shuffle.

    Raises:
        DataError: if a user has no sample.
    """
    if not users or not all(len(user) for user in users):
        raise DataError("users need a sample each to be compared: use fewer users")
    rng = np.random.default_rng(seed)
    most = max(2, min(ROWS, ALL_ROWS // len(users)))
    samples = [user[rng.permutation(len(user))[:most]].astype(np.float64) for user in users]
    x, owner = np.concatenate(samples), np.repeat(np.arange(len(samples)), [len(own) for own in samples])
    unit = rng.normal(size=(DIRECTIONS, x.shape[1]))
    unit /= np.linalg.norm(unit, axis=1, keepdims=True)
    # The shuffled users get the same directions and the same partners.
    partners = np.random.SeedSequence(int(rng.integers(1 << 32)))
    shuffled = rng.permutation(owner)
    return FeatureReport(
        found=_distances(x, owner, unit, partners),
        chance=_distances(x, shuffled, unit, partners),
        features=x.shape[1],
        rows=len(x),
    )


def _distances(x: Array, owner: Array, unit: Array, partners: np.random.SeedSequence) -> WassersteinDistances:
    rng, users = np.random.default_rng(partners), int(owner.max()) + 1
    return WassersteinDistances(
        per_feature=wasserstein_1d(x, owner).mean(axis=1),
        sliced=wasserstein_1d(x @ unit.T, owner).mean(axis=1),
        matched=np.array([_match_distance(rng, x, owner == user, users) for user in range(users)]),
    )


def wasserstein_1d(values: Array, owner: Array) -> Array:
    """Compute, for each column, the exact W1 between a user's values and the equally weighted mixture of all users.

    Args:
        values: the values, (N, k).
        owner: number of the user that has the row, 0 to n - 1, (N,).

    Returns:
        The integral of |F_i - F| over the line, by user and column, (n, k).
    """
    users = int(owner.max()) + 1
    mass = 1.0 / np.bincount(owner, minlength=users)
    order = np.argsort(values, axis=0, kind="stable")
    gaps = np.diff(np.take_along_axis(values, order, axis=0), axis=0)
    whose = owner[order]
    mixture = np.cumsum(mass[whose], axis=0)[:-1] / users
    distances = np.empty((users, values.shape[1]))
    for user in range(users):
        apart = np.cumsum(whose[:-1] == user, axis=0, dtype=np.float64)
        apart *= mass[user]
        apart -= mixture
        np.abs(apart, out=apart)
        distances[user] = np.einsum("nk,nk->k", apart, gaps)
    return distances


def _match_distance(rng: np.random.Generator, x: Array, mine: Array, users: int) -> float:
    """Return W1 between one user (rows ``mine`` of ``x``) and all ``users``, by the best matching with as many samples
    of other users.
    """
    own = x[mine][:MATCHED]
    others = x[~mine]
    if not len(others):
        return 0.0
    partners = others[rng.permutation(len(others))[: len(own)]]
    own = own[: len(partners)]
    squares = (own**2).sum(axis=1)[:, None] + (partners**2).sum(axis=1) - 2 * own @ partners.T
    cost = np.sqrt(np.maximum(squares, 0.0))
    rows, columns = linear_sum_assignment(cost)
    # W1(p_i, p) = (1 - 1/n) W1(p_i, mean of the others), since the user is one n-th of p.
    return float(cost[rows, columns].mean()) * (1 - 1 / users)
