"""Multi-Krum: whole updates are left out, by how far they lie from their nearest neighbours.

Krum (Blanchard, El Mhamdi, Guerraoui and Stainer, NeurIPS 2017) scores each of n updates, f of which may be bad::

    s(i) = sum over the n - f - 2 updates j nearest to i of |x_i - x_j|^2

and multi-Krum is the mean of the m with the lowest scores. It needs 2 f + 2 < n; m = n - f - 2 is the most for which it is
shown to hold (El Mhamdi, Guerraoui and Rouault, ICML 2018, proposition 2).

Distances have a meaning between updates of the same entries only: devices of different submodels are told apart, and each
set of equal entries chooses among its own. What was chosen is averaged over the holders of each entry, as ever.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from server.aggregate.robust import BLOCK, MeanRule

Row = npt.NDArray[np.float32]
Mask = npt.NDArray[np.bool_]
Distances = npt.NDArray[np.float64]


def chosen(rows: Sequence[Row], rule: MeanRule, counted: Mask | None = None) -> list[Row]:
    """The ``rows`` (float32 [n], NaN where an update holds nothing) that count, whatever their order.

    ``counted``, bool [n], are the entries that distances are taken over; None: all of them.
    """
    apart: dict[bytes, list[Row]] = {}
    for row in rows:
        apart.setdefault(np.packbits(np.isnan(row)).tobytes(), []).append(row)
    return [row for alike in apart.values() for row in _of_equals(alike, rule, counted)]


def _of_equals(rows: list[Row], rule: MeanRule, counted: Mask | None) -> list[Row]:
    """Of updates that hold the same entries."""
    bad = rule.left_out(len(rows))
    if not bad:
        return rows
    # Among equal scores the content decides, not who came first.
    rows = sorted(rows, key=lambda row: hashlib.sha256(row.data).digest())
    best = np.argsort(scores(distances(rows, counted), bad), kind="stable")
    return [rows[place] for place in best[: len(rows) - bad - 2]]


def distances(rows: Sequence[Row], counted: Mask | None = None) -> Distances:
    """Squared L2 distances, float64 [K, K], of ``rows`` that hold the same entries.

    Differences are squared as they are: of weights that are nearly equal a product of rows would leave nothing.
    """
    count = len(rows)
    found = np.zeros((count, count), np.float64)
    size = rows[0].size if rows else 0
    width = max(1, BLOCK // max(1, count))
    for start in range(0, size, width):
        part = slice(start, start + width)
        here = ~np.isnan(rows[0][part])
        if counted is not None:
            here &= counted[part]
        block = np.stack([row[part][here] for row in rows]).astype(np.float64)
        for place in range(count - 1):
            found[place, place + 1 :] += np.square(block[place + 1 :] - block[place]).sum(axis=1)
    return found + found.T


def scores(squares: Distances, bad: int) -> npt.NDArray[np.float64]:
    """Krum's score of each update, float64 [K]: the sum of its K - bad - 2 smallest distances to others."""
    others = np.sort(squares + np.diag(np.full(len(squares), np.inf)), axis=1)
    kept: npt.NDArray[np.float64] = others[:, : len(squares) - bad - 2].sum(axis=1)
    return kept
