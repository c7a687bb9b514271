"""Tables of whole numbers with given sums of rows and columns, as near as can be to a table of shares."""

from __future__ import annotations

import numpy as np

from edgefl.data.dataset import Array

SWEEPS, NEAR = 5_000, 1e-7


def balanced(shares: Array, rows: Array, columns: Array) -> Array | None:
    """Sinkhorn's scaling: ``shares`` (n, m) >= 0 with rows and columns multiplied until they have these sums, float64.

    None if they do not come to it, as where the zeros of ``shares`` do not allow these sums.
    """
    table = shares.astype(np.float64)
    for _ in range(SWEEPS):
        table *= (rows / np.maximum(table.sum(axis=1), 1e-300))[:, None]
        table *= columns / np.maximum(table.sum(axis=0), 1e-300)
        if np.abs(table.sum(axis=1) - rows).max() <= NEAR:
            return table
    return None


def rounded(table: Array, rows: Array, columns: Array) -> Array:
    """``table`` with every entry rounded up or down so that its sums are these whole numbers, int64; zeros stay zero.

    Such a table exists: what is left after rounding down is a flow from rows to columns through edges of capacity one.
    """
    whole = np.floor(table + NEAR).astype(np.int64)
    raised = np.zeros(table.shape, bool)
    may = table > NEAR
    open_rows, open_columns = rows - whole.sum(axis=1), columns - whole.sum(axis=0)
    for row in np.repeat(np.arange(len(rows)), np.maximum(open_rows, 0)):
        path = _path(may, raised, int(row), open_columns)
        for from_row, column in path:
            raised[from_row, column] ^= True
        open_columns[path[-1][1]] -= 1
    return np.asarray(whole + raised)


def _path(may: Array, raised: Array, start: int, open_columns: Array) -> list[tuple[int, int]]:
    """Entries to flip so that ``start`` has one more and a column that is short of one gets it (breadth first)."""
    came: dict[
        int, tuple[int, int]
    ] = {}  # column -> (row it was reached from, column that row was reached through)
    queue: list[tuple[int, int]] = [(start, -1)]
    for row, through in queue:
        for column in np.flatnonzero(may[row] & ~raised[row]):
            if int(column) in came:
                continue
            came[int(column)] = (row, through)
            if open_columns[column] > 0:
                return _back(came, int(column))
            queue += [(int(other), int(column)) for other in np.flatnonzero(raised[:, column])]
    raise AssertionError("a table of shares with these sums has a whole one")


def _back(came: dict[int, tuple[int, int]], column: int) -> list[tuple[int, int]]:
    """The flips that lead to ``column``, which is last: a row gives up ``through`` for the column after it."""
    flips: list[tuple[int, int]] = []
    while True:
        row, through = came[column]
        flips.append((row, column))
        if through < 0:
            return flips[::-1]
        flips.append((row, through))
        column = through
