"""Partitions into clients of equal size with different classes.

FAFED's three degrees of similarity (fafed.md 4.3), and a mix of classes for each client (fiarse.md 4.2).
"""

from __future__ import annotations

import numpy as np

from edgefl.data.dataset import Array
from edgefl.data.partition import check_alpha, check_samples, deal
from edgefl.errors import DataError

# Tables of whole numbers with given sums of rows and columns, as near as can be to a table of shares.

SWEEPS, NEAR = 5_000, 1e-7


def balance(shares: Array, rows: Array, columns: Array) -> Array | None:
    """Scale rows and columns of a table until they have the given sums (Sinkhorn).

    Args:
        shares: Table (n, m) with entries >= 0; it is not changed.
        rows: Sum of each row (n,).
        columns: Sum of each column (m,).

    Returns:
        The scaled table, float64 (n, m). None if it does not converge, for example because zeros in ``shares`` rule
        these sums out.
    """
    table = shares.astype(np.float64)
    for _ in range(SWEEPS):
        table *= (rows / np.maximum(table.sum(axis=1), 1e-300))[:, None]
        table *= columns / np.maximum(table.sum(axis=0), 1e-300)
        if np.abs(table.sum(axis=1) - rows).max() <= NEAR:
            return table
    return None


def round_table(table: Array, rows: Array, columns: Array) -> Array:
    """Round each entry of a table up or down so that rows and columns have the given integer sums. Zeros stay zero.

    Such a table exists: the remainders after rounding down are a flow from rows to columns through edges of capacity
    one.

    Args:
        table: Table (n, m) whose rows and columns have these sums approximately.
        rows: Sum of each row, int64 (n,).
        columns: Sum of each column, int64 (m,).

    Returns:
        The rounded table, int64 (n, m).
    """
    whole = np.floor(table + NEAR).astype(np.int64)
    raised = np.zeros(table.shape, bool)
    may = table > NEAR
    open_rows, open_columns = rows - whole.sum(axis=1), columns - whole.sum(axis=0)
    for row in np.repeat(np.arange(len(rows)), np.maximum(open_rows, 0)):
        path = _augmenting_path(may, raised, int(row), open_columns)
        for from_row, column in path:
            raised[from_row, column] ^= True
        open_columns[path[-1][1]] -= 1
    return np.asarray(whole + raised)


def _augmenting_path(may: Array, raised: Array, start: int, open_columns: Array) -> list[tuple[int, int]]:
    """Return the entries to flip, each as (row, column), so that the sum of row ``start`` grows by one.

    The sum of one column that is still too small grows by one as well; all other sums stay. Found by breadth-first search.

    Args:
        may: bool (n, m): entries that may be rounded up.
        raised: bool (n, m): entries that are rounded up now.
        start: Number of the row.
        open_columns: Missing sum of each column (m,).
    """
    # By column: the row it was reached from, and the column through which that row was reached.
    came: dict[int, tuple[int, int]] = {}
    queue: list[tuple[int, int]] = [(start, -1)]
    for row, through in queue:
        for column in np.flatnonzero(may[row] & ~raised[row]):
            if int(column) in came:
                continue
            came[int(column)] = (row, through)
            if open_columns[column] > 0:
                return _trace_back(came, int(column))
            queue += [(int(other), int(column)) for other in np.flatnonzero(raised[:, column])]
    raise AssertionError("a table of shares with these sums has a whole one")


def _trace_back(came: dict[int, tuple[int, int]], column: int) -> list[tuple[int, int]]:
    """Return the entries to flip on the path to ``column``, each as (row, column), in order.

    ``came`` has by column the row from which the search reached it, and the column through which it reached that row;
    -1 for the first row.
    """
    flips: list[tuple[int, int]] = []
    while True:
        row, through = came[column]
        flips.append((row, column))
        if through < 0:
            return flips[::-1]
        flips.append((row, through))
        column = through


LEAST_SHARE = 0.01
"""Smallest Dirichlet entry; smaller ones are raised to it (fafed.md 4.3)."""


def similarity(labels: Array, clients: int, *, percent: float = 95.0, seed: int) -> list[Array]:
    """Partition rows so that a part of each client's data is iid and the rest is sorted by label.

    ``percent`` of the shuffled rows are dealt evenly. The others are sorted by label and cut into consecutive equal
    pieces.

    Args:
        labels: Label of each row.
        clients: Number of clients.
        percent: Percentage of iid rows: 100 is iid, 0 is sorted.
        seed: Seed of the partition.

    Returns:
        Row numbers per client, sorted. Every row is used once, and sizes differ by at most one.

    Raises:
        DataError: ``percent`` is out of range, or there are fewer rows than clients.
    """
    check_samples(labels, clients)
    if not 0.0 <= percent <= 100.0:
        raise DataError(f"similarity lies in 0 to 100 percent, found {percent:g}", percent=percent)
    order = np.random.default_rng(seed).permutation(len(labels))
    # A multiple of the clients, so that only the cut of the sorted rows can make sizes differ.
    dealt = clients * round(len(labels) * percent / 100.0 / clients)
    dealt -= clients * (dealt > len(labels))
    even, others = order[:dealt], order[dealt:]
    others = others[np.argsort(labels[others], kind="stable")]
    pieces = zip(np.array_split(even, clients), np.array_split(others, clients), strict=True)
    return [np.sort(np.concatenate(own)) for own in pieces]


def dirichlet_equal(labels: Array, clients: int, *, alpha: float, seed: int) -> list[Array]:
    """Partition rows so that every client has samples of every class, in Dirichlet proportions, and all have equal size.

    Each entry of the table of counts (clients, classes) is one plus a share of the rest. The shares are a Dirichlet row
    with entries below 0.01 raised to it. They are scaled to the sums of rows and columns (Sinkhorn), and rounded with
    these sums kept.

    Args:
        labels: Label of each row.
        clients: Number of clients.
        alpha: Parameter of the Dirichlet distribution; above 0.
        seed: Seed of the partition.

    Returns:
        Row numbers per client, sorted. Every row is used once, and sizes differ by at most one.

    Raises:
        DataError: A class has fewer samples than there are clients, a client would have fewer samples than there are
            classes, or no table was found.
    """
    check_samples(labels, clients)
    check_alpha(alpha)
    known, counts = np.unique(labels, return_counts=True)
    sizes = _equal_sizes(len(labels), clients)
    if counts.min() < clients or sizes.min() < len(known):
        raise DataError(
            f"partition dirichlet_equal gives each of {clients} devices samples of all {len(known)} classes, found "
            f"{len(labels)} samples, the rarest class with {counts.min()}: take fewer devices, or more samples",
            clients=clients,
            samples=len(labels),
        )
    rng = np.random.default_rng(seed)
    shares = np.maximum(rng.dirichlet(np.full(len(known), alpha), clients), LEAST_SHARE)
    left_rows, left_columns = sizes - len(known), counts - clients
    table = balance(shares, left_rows, left_columns)
    if table is None:
        raise DataError(
            f"dirichlet_equal found no table of counts for {clients} devices with alpha={alpha:g}: raise alpha",
            alpha=alpha,
        )
    return deal(rng, labels, known, 1 + round_table(table, left_rows, left_columns))


def dirichlet_clients(labels: Array, clients: int, *, alpha: float, seed: int) -> list[Array]:
    """Partition rows so that every client has its own mix of classes, p_i ~ Dirichlet(alpha), and equal size (fiarse.md
    4.2).

    In random order, clients that are not full draw a class from p_i, among the classes with samples left, and get one
    sample of it. If p_i has none of these classes, they get any sample. The last clients get the rest, so the mixes
    follow p_i only as far as the data allow. They follow it less for a small ``alpha`` and few samples of a class.

    Args:
        labels: Label of each row.
        clients: Number of clients.
        alpha: Parameter of the Dirichlet distribution; above 0.
        seed: Seed of the partition.

    Returns:
        Row numbers per client, sorted. Every row is used once, and sizes differ by at most one.

    Raises:
        DataError: ``alpha`` is not positive, or there are fewer rows than clients.
    """
    check_samples(labels, clients)
    check_alpha(alpha)
    known, left = np.unique(labels, return_counts=True)
    rng = np.random.default_rng(seed)
    shares = rng.dirichlet(np.full(len(known), alpha), clients)
    turns = rng.permutation(np.repeat(np.arange(clients), _equal_sizes(len(labels), clients)))
    table, reached = np.zeros(shares.shape, np.int64), np.cumsum(shares, axis=1)
    for client, drawn in zip(turns.tolist(), rng.random(len(turns)).tolist(), strict=True):
        line = reached[client] if reached[client, -1] > 0.0 else np.cumsum(left)
        # The first whose sum is beyond the draw: never one without a share.
        place = int(np.searchsorted(line, drawn * line[-1], side="right"))
        table[client, place] += 1
        left[place] -= 1
        if not left[place]:
            shares[:, place] = 0.0
            reached = np.cumsum(shares, axis=1)
    return deal(rng, labels, known, table)


def paired(labels: Array, clients: int, *, seed: int) -> list[Array]:
    """Partition rows so that each pair of clients divides the classes: one gets a random half of them, the other the rest.

    So ``clients / 2`` clients have a class. If classes have equally many samples, each is dealt evenly. If not, clients
    still have equal sizes, unless no table of counts allows it. Then classes are dealt evenly and sizes differ.

    Args:
        labels: Label of each row.
        clients: Number of clients.
        seed: Seed of the partition.

    Returns:
        Row numbers per client, sorted. Every row is used once.

    Raises:
        DataError: The number of clients or of classes is odd, or a class has fewer samples than clients that need it.
    """
    check_samples(labels, clients)
    known, counts = np.unique(labels, return_counts=True)
    if clients % 2 or len(known) % 2 or counts.min() < clients // 2:
        raise DataError(
            f"partition paired gives two devices at a time all classes, half to each, found {clients} devices, "
            f"{len(known)} classes, the rarest with {counts.min()} samples: take an even number of both, and at most twice "
            "as many devices as the rarest class has samples",
            clients=clients,
            classes=len(known),
        )
    rng = np.random.default_rng(seed)
    holdings = np.zeros((clients, len(known)))
    for first in range(0, clients, 2):
        half = rng.permutation(len(known))[: len(known) // 2]
        holdings[first, half] = 1.0
        holdings[first + 1] = 1.0 - holdings[first]
    return deal(rng, labels, known, _divide_classes(holdings, counts))


def _divide_classes(held: Array, counts: Array) -> Array:
    """Return the number of samples per client and class, int64 (clients, classes).

    Clients get equal sizes if a table of counts allows it; otherwise each class is dealt evenly over its clients.

    Args:
        held: (clients, classes): 1 for the classes of a client, 0 for others, which it gets no sample of.
        counts: Samples of each class (classes,).
    """
    clients = len(held)
    sizes = _equal_sizes(int(counts.sum()), clients)
    table = balance(held, sizes, counts)
    if table is not None:
        whole = round_table(table, sizes, counts)
        if np.array_equal(whole > 0, held > 0):
            return whole
    even = np.zeros(held.shape, np.int64)
    for at, count in enumerate(counts):
        even[held[:, at] > 0, at] = _equal_sizes(int(count), clients // 2)
    return even


def _equal_sizes(samples: int, clients: int) -> Array:
    """Return the sizes of the parts (clients,) if ``samples`` are divided among ``clients``. They differ by at most one."""
    return np.asarray(samples // clients + (np.arange(clients) < samples % clients), np.int64)
