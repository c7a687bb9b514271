"""How different the users' label frequencies are: total variation, and Wasserstein distances between labels."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from edgefl.data.dataset import Array
from edgefl.wire.errors import DataError


@dataclass(frozen=True, eq=False)
class LabelReport:
    """Label frequencies of n users, each user weighing the same (per_fedavg.md 6.6 a).

    ``tv`` (n,) are the users' total variations from the mean ``p`` (classes,), ``pairwise`` (n, n) those between users.
    Under the 0/1 metric on labels these are the 1-Wasserstein distances too; ``ordered_w1`` (n,) are those where labels
    are numbers on a line, |y - y'| apart. They say what the users' samples differ by where users share p(x|y); else they
    are a lower bound.
    """

    frequencies: Array
    p: Array
    tv: Array
    pairwise: Array
    ordered_w1: Array

    @property
    def mean_tv2(self) -> float:
        """(1/n) sum TV_i^2: gamma_G^2 <= 4 B^2 times it, gamma_H^2 <= 4 L^2 times it (eq. 14).

        B and L bound every single sample's gradient and Hessian. With what a report knows of them, the largest norm of a
        batch's gradient and of a user's Hessian, both are estimates and no bounds.
        """
        return float((self.tv**2).mean())

    @property
    def mean_pairwise(self) -> float:
        """Over all n^2 ordered pairs, each user with itself included."""
        return float(self.pairwise.mean())


def label_report(counts: Array) -> LabelReport:
    """From samples per user and class, (n, classes). DataError for a user without a sample."""
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
    """Each user's class frequencies, from samples per user and class, (n, classes). DataError as :func:`label_report`."""
    totals = counts.sum(axis=1, keepdims=True)
    empty = np.flatnonzero(totals[:, 0] == 0)
    if not len(counts) or len(empty):
        raise DataError(
            f"users need a sample each, found {len(counts)} users, {len(empty)} of them without: use fewer users",
            empty=tuple(map(int, empty)),
        )
    return np.asarray(counts / totals)


def mean_pairwise(frequencies: Array) -> float:
    """:attr:`LabelReport.mean_pairwise`, without the table of all pairs: of sorted values, the k-th of n is subtracted from
    n - 1 - k larger ones and has k smaller ones subtracted from it."""
    users = len(frequencies)
    signs = 2.0 * np.arange(users) - users + 1.0
    return float((signs[:, None] * np.sort(frequencies, axis=0)).sum()) / users**2


def total_variation(first: Array, second: Array) -> Array:
    """1/2 sum |q1 - q2| over the last dimension."""
    return np.asarray(0.5 * np.abs(first - second).sum(axis=-1))


def majority_levels(counts: Array) -> tuple[float, float]:
    """Accuracy of always saying a user's own commonest class: mean over users, and over samples (per_fedavg.md 4.4)."""
    most, totals = counts.max(axis=1), counts.sum(axis=1)
    return float((most / totals).mean()), float(most.sum() / totals.sum())


def grouped(counts: Array) -> dict[tuple[int, ...], list[int]]:
    """Users by the classes that they hold, in order of their first user."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for user, row in enumerate(counts):
        groups.setdefault(tuple(int(label) for label in np.flatnonzero(row)), []).append(user)
    return groups
