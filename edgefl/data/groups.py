"""Per-FedAvg's partition: ten groups of users, half of them with five classes and half with one or two (per_fedavg.md
3.2).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgefl.data.dataset import Array
from edgefl.data.partition import deal
from edgefl.errors import DataError

GROUPS, HALF = 10, 5


def groups(
    labels: Array,
    clients: int,
    *,
    a: int = 0,
    single_class: bool = False,
    seed: int,
    order: Sequence[int] | None = None,
) -> list[Array]:
    """Partition rows into Per-FedAvg's ten groups of ``clients / 10`` users (per_fedavg.md 3.2).

    Users of groups 1 to 5 have ``a`` samples of each of the first five classes. Users of group 5 + j have ``a / 2`` of
    class j and ``2 a`` of class 5 + j; with ``single_class`` they have only the latter. Group g is clients ``(g - 1) *
    clients / 10`` to ``g * clients / 10 - 1``. Remaining rows are unused. Equal seeds give equal partitions.

    Args:
        labels: Label of each row, of ten classes.
        clients: Number of clients, a multiple of ten.
        a: Even number of samples. 0: the largest that the labels allow.
        single_class: Users of groups 6 to 10 have one class instead of two.
        seed: Seed of the partition.
        order: Order of the ten labels. None: ascending.

    Returns:
        Row numbers per client, sorted and disjoint.

    Raises:
        DataError: The labels do not allow ``a`` (the message has the largest possible), or there are not ten classes.
    """
    known = _ten_labels(labels, order)
    table = _table(labels, known, clients, a, single_class)
    return deal(np.random.default_rng(seed), labels, known, table)


def largest_a(
    labels: Array, clients: int, *, single_class: bool = False, order: Sequence[int] | None = None
) -> int:
    """Return the largest even ``a`` that :func:`groups` can use with these labels, or 0 if there is none.

    With q users in a group, it needs ``5.5 q a`` samples of each of the first five classes (``5 q a`` for
    ``single_class``). Of each other class it needs ``2 q a``. See :func:`groups` for the arguments.

    Raises:
        DataError: There are not ten classes, or ``clients`` is no multiple of ten.
    """
    known = _ten_labels(labels, order)
    counts = np.array([np.count_nonzero(labels == label) for label in known])
    # Samples of a class that all users together take for a = 2, as whole numbers.
    needed = counts_of(clients, 2, single_class=single_class).sum(axis=0)
    return 2 * int((counts // needed).min())


def counts_of(clients: int, a: int, *, single_class: bool = False) -> Array:
    """Return the number of samples per user and class, int64 (clients, 10): the table of per_fedavg.md 3.2.

    Classes are in the order of :func:`groups`, users in the order of the groups.

    Raises:
        DataError: ``clients`` is no multiple of ten.
    """
    if clients < GROUPS or clients % GROUPS:
        raise DataError(
            f"partition groups has ten groups of equally many users, found {clients} devices: take a multiple of ten",
            clients=clients,
        )
    table = np.zeros((GROUPS, GROUPS), np.int64)
    table[:HALF, :HALF] = a
    for group in range(HALF):
        table[HALF + group, group] = 0 if single_class else a // 2
        table[HALF + group, HALF + group] = 2 * a
    return np.repeat(table, clients // GROUPS, axis=0)


def _table(labels: Array, known: Sequence[int], clients: int, a: int, single_class: bool) -> Array:
    """Return the number of samples per user and class of :func:`groups`, int64 (clients, 10).

    ``a`` is the number of samples that scales the table; 0 selects the largest possible one.

    Raises:
        DataError: ``a`` is odd, or the labels do not allow it.
    """
    most = largest_a(labels, clients, single_class=single_class, order=known)
    wanted = a or most
    if wanted < 2 or wanted % 2 or wanted > most:
        remedy = f"take an even number from 2 to {most}" if most else "take fewer devices or more samples"
        raise DataError(
            f"partition groups cannot give {clients} devices a = {wanted} samples of a class: a is even, and "
            f"{len(labels)} samples allow at most {most}; {remedy}",
            a=wanted,
            largest=most,
            clients=clients,
        )
    return counts_of(clients, wanted, single_class=single_class)


def _ten_labels(labels: Array, order: Sequence[int] | None) -> Sequence[int]:
    """Return the ten labels, in the given ``order`` or ascending if that is None.

    Raises:
        DataError: There are not ten labels, or ``order`` names others.
    """
    present = set(np.unique(labels).tolist())
    known = sorted(present) if order is None else [int(label) for label in order]
    if len(known) != GROUPS or set(known) != present:
        raise DataError(
            f"partition groups spreads ten classes, each named once, found the labels {sorted(present)} in the data"
            + ("" if order is None else f" and the order {known}")
            + ": take a dataset of ten classes, or another partition",
            labels=tuple(sorted(present)),
        )
    return known
