"""Partitions of labelled samples: among clients, and into a training part and a test part.

Clients get uniform parts, a Dirichlet distribution per label, few labels or shards each, or whole owners.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from edgefl.data.dataset import Array
from edgefl.errors import DataError

REDRAWS = 1000


def iid(labels: Array, clients: int, *, seed: int) -> list[Array]:
    """Partition shuffled rows into parts whose sizes differ by at most one.

    Args:
        labels: Label of each row.
        clients: Number of clients.
        seed: Seed of the partition.

    Returns:
        Row numbers per client, sorted.

    Raises:
        DataError: There are fewer rows than clients.
    """
    check_samples(labels, clients)
    order = np.random.default_rng(seed).permutation(len(labels))
    return [np.sort(part) for part in np.array_split(order, clients)]


def dirichlet(
    labels: Array, clients: int, *, alpha: float, seed: int, min_samples: int = 1, redraws: int = REDRAWS
) -> list[Array]:
    """Partition rows by a Dirichlet distribution per label (embracingfl.md 3.5).

    For each label k, q_k ~ Dir(alpha * 1_m), and the shuffled samples of k are cut at the cumulative proportions of
    q_k. Every row is used once. Equal seeds give equal partitions.

    Args:
        labels: Label of each row.
        clients: Number m of clients.
        alpha: Parameter of the Dirichlet distribution; above 0.
        seed: Seed of the partition.
        min_samples: Fewest rows of a client. While a client has fewer, the whole partition is drawn again.
        redraws: Most times that it is drawn again.

    Returns:
        Row numbers per client, sorted.

    Raises:
        DataError: ``alpha`` is not positive, or a client has too few rows after all redraws.
    """
    check_samples(labels, clients, min_samples)
    check_alpha(alpha)
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


def by_owners(labels: Array, clients: int, *, owners: Array, seed: int) -> list[Array]:
    """Partition rows so that each owner (author, speaker, document) is at one client.

    The owners with most rows are placed first, each at the client with the fewest rows so far. The seed orders owners
    with equally many rows.

    Args:
        labels: Label of each row.
        clients: Number of clients.
        owners: Owner of each row.
        seed: Seed of the partition.

    Returns:
        Row numbers per client, sorted.

    Raises:
        DataError: There are fewer owners than clients.
    """
    check_samples(labels, clients)
    numbers, counts = np.unique(owners, return_counts=True)
    if len(numbers) < clients:
        raise DataError(
            f"{len(numbers)} owners cannot be spread over {clients} clients: take fewer clients, or another partition",
            clients=clients,
        )
    shuffled = np.random.default_rng(seed).permutation(len(numbers))
    held = np.zeros(clients, np.int64)
    client_of: dict[int, int] = {}
    for place in shuffled[np.argsort(-counts[shuffled], kind="stable")]:
        client = int(held.argmin())
        client_of[int(numbers[place])] = client
        held[client] += counts[place]
    clients_of_rows = np.array([client_of[int(owner)] for owner in owners], np.int64)
    return [np.flatnonzero(clients_of_rows == client) for client in range(clients)]


def _draw(rng: np.random.Generator, labels: Array, clients: int, alpha: float) -> list[Array]:
    """Return the row numbers per client of one draw of :func:`dirichlet`, sorted. A client may have none."""
    pieces: list[list[Array]] = [[] for _ in range(clients)]
    for label in np.unique(labels):
        rows = rng.permutation(np.flatnonzero(labels == label))
        shares = rng.dirichlet(np.full(clients, alpha))
        cuts = np.rint(np.cumsum(shares)[:-1] * len(rows)).astype(np.int64)
        for client, piece in enumerate(np.split(rows, cuts)):
            pieces[client].append(piece)
    return [np.sort(np.concatenate(parts)) for parts in pieces]


def by_labels(labels: Array, clients: int, *, per_client: int, seed: int) -> list[Array]:
    """Partition rows so that each client has at most ``per_client`` labels (Non-IID-2, fedbat.md 4.2).

    Client k owns the (k mod C)-th of the C labels. If there are fewer clients than labels, it also owns every label
    that would have no owner. The rest of its ``per_client`` labels are drawn at random. The shuffled rows of each label
    are divided among its owners in parts whose sizes differ by at most one. Every row is used once. Equal seeds give
    equal partitions.

    Args:
        labels: Label of each row.
        clients: Number of clients.
        per_client: Number of labels of a client.
        seed: Seed of the partition.

    Returns:
        Row numbers per client, sorted.

    Raises:
        DataError: These numbers of labels and clients do not match, or a client gets no row.
    """
    check_samples(labels, clients)
    known = np.unique(labels)
    _check_ownable(len(known), clients, per_client)
    rng = np.random.default_rng(seed)
    owned = [_choose_labels(rng, client, clients, len(known), per_client) for client in range(clients)]
    pieces: list[list[Array]] = [[] for _ in range(clients)]
    for place, label in enumerate(known):
        # In random order, so that it is not always the first clients who get one row more.
        owners = rng.permutation([client for client in range(clients) if place in owned[client]])
        rows = rng.permutation(np.flatnonzero(labels == label))
        for client, piece in zip(owners, np.array_split(rows, len(owners)), strict=True):
            pieces[client].append(piece)
    parts = [np.sort(np.concatenate(own)) for own in pieces]
    if not all(len(part) for part in parts):
        raise DataError(
            f"{clients} clients of {per_client} labels each leave one without a row of {len(labels)}: use fewer clients, "
            "more samples or more labels per client",
            clients=clients,
            per_client=per_client,
        )
    return parts


def by_shards(labels: Array, clients: int, *, per_client: int, seed: int) -> list[Array]:
    """Cut the rows, sorted by label, into shards of equal size, and deal these at random (McMahan et al., 2017,
    section 3).

    Rows of a label are shuffled first. Sizes of shards differ by at most one. Every row is used once. Equal seeds give
    equal partitions.

    Args:
        labels: Label of each row.
        clients: Number of clients.
        per_client: Number of shards of a client.
        seed: Seed of the partition.

    Returns:
        Row numbers per client, sorted.

    Raises:
        DataError: There are fewer rows than shards.
    """
    check_samples(labels, clients, per_client)
    rng = np.random.default_rng(seed)
    shuffled = rng.permutation(len(labels))
    shards = np.array_split(shuffled[np.argsort(labels[shuffled], kind="stable")], clients * per_client)
    dealt = rng.permutation(len(shards)).reshape(clients, per_client)
    return [np.sort(np.concatenate([shards[number] for number in own])) for own in dealt]


def _choose_labels(rng: np.random.Generator, client: int, clients: int, labels: int, count: int) -> set[int]:
    """Return the labels of client number ``client``, as positions below ``labels``, the number of labels.

    They are ``client`` modulo ``labels``, those that otherwise no client would own, and random ones up to ``count``.
    """
    first = [client % labels, *range(client + clients, labels, clients)]
    others = np.setdiff1d(np.arange(labels), first)
    return {*first, *rng.choice(others, count - len(first), replace=False).tolist()}


def _check_ownable(labels: int, clients: int, per_client: int) -> None:
    """Raise DataError unless ``clients`` clients with ``per_client`` different labels each can cover ``labels`` labels."""
    fewest = -(-labels // clients)
    if not fewest <= per_client <= labels:
        raise DataError(
            f"{clients} clients share {labels} labels with {fewest} to {labels} for each, found {per_client}: change "
            "labels_per_device, or the number of clients",
            labels=labels,
            clients=clients,
            per_client=per_client,
        )


def match_shares(labels: Array, wanted: Array, *, seed: int) -> list[Array]:
    """Return rows for each client whose classes have the proportions of a table.

    All clients get the same share of their row of ``wanted``. It is the largest share, at most 1, for which every
    class has enough samples, to within one sample of a class.

    Args:
        labels: Label of each row.
        wanted: Samples per client and class, (clients, C).
        seed: Seed of the choice.

    Returns:
        Row numbers per client, sorted and disjoint.

    Raises:
        DataError: A client would get no row, or a class that is wanted has no samples.
    """
    counts = np.bincount(labels, minlength=wanted.shape[1])[: wanted.shape[1]]
    needed = wanted.sum(axis=0)
    share = min((counts[needed > 0] / needed[needed > 0]).min(), 1.0)
    # A hair more before rounding down: a share of 1/3 of 3 samples is one.
    reached = np.floor(np.cumsum(wanted, axis=0) * share + 1e-9).astype(np.int64)
    rng = np.random.default_rng(seed)
    parts = deal(rng, labels, range(wanted.shape[1]), np.diff(reached, axis=0, prepend=0))
    empty = [client for client, part in enumerate(parts) if not len(part)]
    if empty:
        raise DataError(
            f"{len(labels)} samples leave {len(empty)} of {len(parts)} clients without one of their own classes: use more "
            "samples (data.test_samples), or fewer clients",
            clients=len(parts),
            empty=tuple(empty),
        )
    return parts


def histograms(labels: Array, parts: Sequence[Array], classes: int) -> Array:
    """Return the number of samples per client and label, int64 (clients, classes).

    Args:
        labels: Label of each row.
        parts: Row numbers per client.
        classes: Number of classes.
    """
    return np.stack([np.bincount(labels[part], minlength=classes) for part in parts]).astype(np.int64)


def deal(rng: np.random.Generator, labels: Array, classes: Iterable[int], table: Array) -> list[Array]:
    """Return the row numbers of each client, sorted: as many random rows of each class as ``table`` has.

    Args:
        rng: Random generator that shuffles the rows, class by class.
        labels: Class of each row.
        classes: Classes in the order of the table's columns.
        table: Number of rows per client and class, int64 (clients, classes). Remaining rows are unused.
    """
    pieces: list[list[Array]] = [[] for _ in table]
    for label, column in zip(classes, table.T, strict=True):
        rows = rng.permutation(np.flatnonzero(labels == label))
        for own, piece in zip(pieces, np.split(rows, np.cumsum(column)), strict=False):
            own.append(piece)
    return [np.sort(np.concatenate(own)) for own in pieces]


def check_alpha(alpha: float) -> None:
    """Raise DataError unless Dirichlet's ``alpha`` is positive."""
    if alpha <= 0:
        raise DataError(f"Dirichlet's alpha must be positive, found {alpha:g}", alpha=alpha)


def check_samples(labels: Array, clients: int, min_samples: int = 1) -> None:
    """Raise DataError unless ``clients`` is positive and ``labels`` has ``min_samples`` rows for each client."""
    if clients < 1 or len(labels) < clients * min_samples:
        raise DataError(
            f"{len(labels)} samples cannot give {clients} clients {min_samples} each: take fewer clients, or more samples",
            samples=len(labels),
            clients=clients,
        )


_TEST_SHARE = 0.2

Class = TypeVar("Class", bound=Hashable)
Sample = TypeVar("Sample", bound=Any)


def hold_out(
    samples: Mapping[Class, Sequence[Sample]], seed: int
) -> tuple[dict[Class, list[Sample]], dict[Class, list[Sample]]]:
    """Split the samples of each class into four fifths for training and one fifth for testing, both sorted.

    A class with two samples or more has at least one of each; the sample of a smaller class is for training.

    Args:
        samples: File names or row numbers by class.
        seed: Seed of the choice.

    Returns:
        (training samples by class, test samples by class).

    Raises:
        DataError: No class has two samples.
    """
    generator = np.random.Generator(np.random.Philox(seed))
    train, test = {}, {}
    for name, members in samples.items():
        order = [members[place] for place in generator.permutation(len(members))]
        count = min(max(1, round(_TEST_SHARE * len(order))), len(order) - 1)
        train[name], test[name] = sorted(order[count:]), sorted(order[:count])
    if not any(test.values()):
        raise DataError(
            "expected at least 2 samples of a class, one of them to test on, found 1 of each; add samples, or test data"
        )
    return train, test
