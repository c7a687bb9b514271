"""Spreading labelled samples over clients: uniformly, or per label by a Dirichlet distribution."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgefl.data.dataset import Array
from edgefl.wire.errors import DataError

REDRAWS = 1000


def iid(labels: Array, clients: int, *, seed: int) -> list[Array]:
    """Shuffled rows in parts whose sizes differ by at most one; row numbers per client, sorted."""
    _check(labels, clients, 1)
    order = np.random.default_rng(seed).permutation(len(labels))
    return [np.sort(part) for part in np.array_split(order, clients)]


def dirichlet(
    labels: Array,
    clients: int,
    *,
    alpha: float,
    seed: int,
    min_samples: int = 1,
    redraws: int = REDRAWS,
) -> list[Array]:
    """Per-label Dirichlet partition (EmbracingFL spec 3.5); row numbers per client, sorted.

    For each label k, q_k ~ Dir(alpha * 1_m) and the shuffled samples of k are cut at the cumulative proportions of
    q_k. Every row is used once. The whole partition is drawn again, at most ``redraws`` times, while a client has
    fewer than ``min_samples`` rows; then DataError. Equal seeds give equal partitions.
    """
    _check(labels, clients, min_samples)
    if alpha <= 0:
        raise DataError(f"Dirichlet's alpha must be positive, found {alpha}", alpha=alpha)
    rng = np.random.default_rng(seed)
    for _ in range(redraws + 1):
        parts = _draw(rng, labels, clients, alpha)
        if min(len(part) for part in parts) >= min_samples:
            return parts
    raise DataError(
        f"{redraws + 1} draws of {len(labels)} samples over {clients} clients with alpha={alpha} each left a client "
        f"with fewer than {min_samples}: raise alpha, or use fewer clients or more samples",
        clients=clients,
        alpha=alpha,
    )


def _draw(rng: np.random.Generator, labels: Array, clients: int, alpha: float) -> list[Array]:
    pieces: list[list[Array]] = [[] for _ in range(clients)]
    for label in np.unique(labels):
        rows = rng.permutation(np.flatnonzero(labels == label))
        shares = rng.dirichlet(np.full(clients, alpha))
        cuts = np.rint(np.cumsum(shares)[:-1] * len(rows)).astype(np.int64)
        for client, piece in enumerate(np.split(rows, cuts)):
            pieces[client].append(piece)
    return [np.sort(np.concatenate(parts)) for parts in pieces]


def histograms(labels: Array, parts: Sequence[Array], classes: int) -> Array:
    """Samples per client and label, int64, shape (clients, classes)."""
    return np.stack([np.bincount(labels[part], minlength=classes) for part in parts]).astype(np.int64)


def _check(labels: Array, clients: int, min_samples: int) -> None:
    if clients < 1 or len(labels) < clients * min_samples:
        raise DataError(
            f"{len(labels)} samples cannot give {clients} clients {min_samples} each",
            samples=len(labels),
            clients=clients,
        )
