"""Averages of the updates of a round: over the holders of an entry, over the updates that changed it, or by a robust
rule.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt

from edgefl.wire.tensors import Array
from edgefl_server.aggregate.accumulator import Accumulator, Call, ModelStep
from edgefl_server.aggregate.adders import CheckedArrays, UpdateBatch
from edgefl_server.aggregate.robust import BLOCK, RobustRule, combine
from edgefl_server.aggregate.scatter import LENGTH, TARGET, Floats, Integers, Layout, TierBlocks

# Multi-Krum: whole updates are left out, by how far they lie from their nearest neighbours.
#
# Krum (Blanchard, El Mhamdi, Guerraoui and Stainer, NeurIPS 2017) scores each of n updates, f of which may be bad::
#
#     s(i) = sum over the n - f - 2 updates j nearest to i of |x_i - x_j|^2
#
# and multi-Krum is the mean of the m with the lowest scores. It needs 2 f + 2 < n; m = n - f - 2 is the most for which it is
# shown to hold (El Mhamdi, Guerraoui and Rouault, ICML 2018, proposition 2).
#
# Distances have a meaning between updates of the same entries only: the rule separates devices of different submodels,
# and each set of equal entries chooses among its own. The chosen updates are averaged over the
# holders of each entry, as ever.

Row = npt.NDArray[np.float32]
Mask = npt.NDArray[np.bool_]
Distances = npt.NDArray[np.float64]


def select_rows(rows: Sequence[Row], rule: RobustRule, counted: Mask | None = None) -> list[Row]:
    """Return the updates that multi-Krum selects. Their order has no meaning.

    Updates that hold different entries are not compared: each set of updates with the same entries is selected from
    separately.

    Args:
        rows: Updates, each float32 [n], NaN at entries that it does not hold.
        rule: Rule that sets the number of updates to leave out.
        counted: Mask of the entries that distances use, bool [n]; None for all.
    """
    apart: dict[bytes, list[Row]] = {}
    for row in rows:
        apart.setdefault(np.packbits(np.isnan(row)).tobytes(), []).append(row)
    return [row for alike in apart.values() for row in _select_equal(alike, rule, counted)]


def _select_equal(rows: list[Row], rule: RobustRule, counted: Mask | None) -> list[Row]:
    """Return the updates that multi-Krum selects among ``rows``, which all hold the same entries.

    All of them are returned if there are too few to leave any out.
    """
    bad = rule.left_out(len(rows))
    if not bad:
        return rows
    # Among equal scores the content decides, not who came first.
    rows = sorted(rows, key=lambda row: hashlib.sha256(row.data).digest())
    best = np.argsort(scores(distances(rows, counted), bad), kind="stable")
    return [rows[place] for place in best[: len(rows) - bad - 2]]


def distances(rows: Sequence[Row], counted: Mask | None = None) -> Distances:
    """Return the squared L2 distance between each two of K ``rows`` that hold the same entries, float64 [K, K].

    ``counted``, bool [n], masks the entries to use; None for all. Differences are squared directly: the expansion into
    products would cancel for weights that are nearly equal.
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
    """Return Krum's score of each of K updates, float64 [K]: the sum of its ``K - bad - 2`` smallest distances to other
    updates.

    ``squares`` is the result of :func:`distances`, ``bad`` the number of updates that may be bad.
    """
    others = np.sort(squares + np.diag(np.full(len(squares), np.inf)), axis=1)
    kept: npt.NDArray[np.float64] = others[:, : len(squares) - bad - 2].sum(axis=1)
    return kept


_BATCH = 64
"""Largest number of buffered updates."""

_WAITING = 16
"""Bytes of buffered updates per entry of the model that are always permitted: four dense updates."""

_ROOM = 1 << 28
"""Bytes of buffered updates that are always permitted. It helps small models, as each batch is a pass over the sums."""


@dataclass(frozen=True)
class PartialAverage:
    """Sums of some of a round's updates, to be added by another aggregator of the same round.

    Attributes:
        sums: Fixed-point sums, int64 [model].
        weights: Weight of each entry, int64 [model], or [1] if all are equal.
        rows: Each update as float32 [model], for rules that need all updates at once; then the other two are
            empty.
    """

    sums: Integers
    weights: Integers
    rows: tuple[npt.NDArray[np.float32], ...] = ()


class Average(Protocol):
    """Average of a round's checked updates, which are added one by one.

    ``packed`` is True if :meth:`add` accepts encoded updates, False if it needs them decoded to float32.
    """

    @property
    def packed(self) -> bool: ...

    def add(self, update: CheckedArrays, weight: int, factor: float) -> None:
        """Add ``update`` with ``weight``. ``factor`` (weight times fixed-point scale) multiplies its values before
        rounding.
        """

    def added(self) -> PartialAverage:
        """Return the sums of all updates so far. The arrays are not copied, so the caller must not change them."""

    def take(self, added: PartialAverage) -> None:
        """Add the sums of another average of the same round, which its :meth:`added` returned."""

    def plan_renewal(self, renewal: ModelStep) -> list[Call]:
        """Return calls that write the new model into ``renewal.new``. They may run on any threads.

        An entry becomes the average (plus the old value for changes), or keeps the old value if no update holds it.
        Do not add updates until the calls have finished.
        """


class HolderMean:
    """Weighted mean over the updates that hold an entry. Encoded updates are buffered and added in batches to
    ``sums``.
    """

    packed = True

    def __init__(self, layout: Layout, sums: Accumulator, scale: float) -> None:
        self._sums = sums
        self._scale = scale
        self._size = layout.size
        self._held: dict[int, tuple[TierBlocks, int]] = {}
        self._waiting: dict[int, list[tuple[CheckedArrays, float]]] = {}
        self._waiting_bytes = 0
        self._most_bytes = max(_ROOM, _WAITING * layout.size)
        self._taken = np.zeros(1, np.int64)

    def add(self, update: CheckedArrays, weight: int, factor: float) -> None:
        count = sum(len(batch) for batch in self._waiting.values())
        if count == _BATCH or self._waiting_bytes + update.nbytes > self._most_bytes:
            self.flush()
        key = id(update.pieces)  # the entry keeps the pieces alive, so no other object gets their id
        self._held[key] = (update.pieces, self._held.get(key, (update.pieces, 0))[1] + weight)
        self._waiting.setdefault(key, []).append((update, factor))
        self._waiting_bytes += update.nbytes

    def flush(self) -> None:
        """Add the buffered updates to the accumulator."""
        for batch in self._batches():
            self._sums.add(batch.pieces, batch.updates, batch.factors)
        self._waiting, self._waiting_bytes = {}, 0

    def added(self) -> PartialAverage:
        self.flush()
        return PartialAverage(self._sums.sums(), self._total_weights())

    def take(self, added: PartialAverage) -> None:
        self._sums.take(added.sums)
        self._taken = self._taken + added.weights

    def _batches(self) -> list[UpdateBatch]:
        return [
            UpdateBatch(
                batch[0][0].pieces, [update for update, _ in batch], np.array([factor for _, factor in batch])
            )
            for batch in self._waiting.values()
        ]

    def plan_renewal(self, renewal: ModelStep) -> list[Call]:
        if not all(self._sums.by_parts(batch[0][0].pieces) for batch in self._waiting.values()):
            self.flush()
        batches, weights = self._batches(), self._total_weights()
        calls = self._sums.plan_renewal(batches, renewal, weights, self._scale)
        if calls:
            return calls
        ended = self._sums.sum_parts(batches)

        def merge(part: slice, old: Floats, new: Floats) -> None:
            own = weights if weights.size == 1 else weights[part]
            _mean(ended(part), own, self._scale, old, renewal, new)

        return renewal.by_parts(merge)

    def _total_weights(self) -> Integers:
        """Return the total weight of each entry, int64 [model], or int64 [1] if all entries have the same."""
        if all(pieces.whole for pieces, _ in self._held.values()):
            return self._taken + sum(weight for _, weight in self._held.values())
        from edgefl_server.aggregate import kernels

        weights = np.zeros(self._size, np.int64)
        weights += self._taken
        for pieces, weight in self._held.values():
            kernels.add_weight(weight, pieces.blocks, pieces.index, self._size, weights)
        return weights


class ChangeMean:
    """Weighted mean over the updates that differ from ``base`` at an entry, for updates decoded to float32.

    With ``change`` (updates hold changes) an update counts where it differs from 0.
    """

    packed = False

    def __init__(self, base: npt.NDArray[np.float32], scale: float, *, change: bool) -> None:
        self._base = np.zeros_like(base) if change else base
        self._scale = scale
        self._sums = np.zeros(base.size, np.int64)
        self._weights = np.zeros(base.size, np.int64)

    def add(self, update: CheckedArrays, weight: int, factor: float) -> None:
        from edgefl_server.aggregate import kernels

        pieces = update.pieces
        addresses = np.array([[array.ctypes.data for array in update.arrays]], np.uint64)
        kernels.add_changed(
            addresses,
            factor,
            self._base,
            weight,
            pieces.blocks,
            pieces.index,
            pieces.model,
            self._sums,
            self._weights,
        )

    def added(self) -> PartialAverage:
        return PartialAverage(self._sums, self._weights)

    def take(self, added: PartialAverage) -> None:
        self._sums += added.sums
        self._weights += added.weights

    def plan_renewal(self, renewal: ModelStep) -> list[Call]:
        def merge(part: slice, old: Floats, new: Floats) -> None:
            _mean(self._sums[part], self._weights[part], self._scale, old, renewal, new)

        return renewal.by_parts(merge)


class RobustAverage:
    """Robust average, which stores each update as float32 [model] until the round ends. Missing entries are NaN.

    ``counted``, bool [model], masks the entries that multi-Krum compares; None for all. ``scale`` is the fixed-point
    value of 1.0.
    """

    packed = False

    def __init__(
        self, layout: Layout, rule: RobustRule, scale: float, counted: npt.NDArray[np.bool_] | None = None
    ) -> None:
        self._size = layout.size
        self._rule = rule
        self._counted = counted
        self._scale = scale
        self._rows: list[npt.NDArray[np.float32]] = []

    def add(self, update: CheckedArrays, weight: int, factor: float) -> None:
        row = np.full(self._size, np.nan, np.float32)
        flat, share = _flat(update.arrays), factor / (weight * self._scale)
        if share != 1.0:
            flat *= np.float32(share)
        start, pieces = 0, update.pieces
        for length, at in pieces.blocks[:, [LENGTH, TARGET]].tolist():
            listed = at - pieces.model
            place = slice(at, at + length) if listed < 0 else pieces.index[listed : listed + length]
            row[place] = flat[start : start + length]
            start += length
        self._rows.append(row)

    def added(self) -> PartialAverage:
        nothing = np.zeros(0, np.int64)
        return PartialAverage(nothing, nothing, tuple(self._rows))

    def take(self, added: PartialAverage) -> None:
        self._rows.extend(added.rows)

    def plan_renewal(self, renewal: ModelStep) -> list[Call]:
        if self._rule.name == "multi_krum":
            self._rows = select_rows(self._rows, self._rule, self._counted)
        return renewal.by_parts(partial(self._merge, renewal.change))

    def _merge(self, change: bool, part: slice, old: Floats, new: Floats) -> None:
        new[:] = old
        width = max(1, BLOCK // max(1, len(self._rows)))
        for start in range(part.start, part.stop if self._rows else part.start, width):
            stop = min(part.stop, start + width)
            values = np.stack([row[start:stop] for row in self._rows])
            result, mask = combine(values, ~np.isnan(values), self._rule)
            here = slice(start - part.start, stop - part.start)
            before = old[here]
            new[here] = np.where(mask, (before + result if change else result).astype(new.dtype), before)


def _mean(
    sums: Integers, weights: Integers, scale: float, old: Floats, renewal: ModelStep, new: Floats
) -> None:
    from edgefl_server.aggregate import blocks

    blocks.mean(sums, weights, scale, old, renewal.change, new)


def _flat(arrays: tuple[Array, ...]) -> npt.NDArray[np.float32]:
    return np.concatenate([array.reshape(-1) for array in arrays]) if arrays else np.empty(0, np.float32)
