"""Statistics of a run's submodels over the rounds, and summaries of its accuracies (fiarse.md 2.11, A12)."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
import numpy.typing as npt

from edgefl.errors import ModelError
from edgefl.submodels.importance.thresholds import Mask

Packed = npt.NDArray[np.uint8]

_ONES = np.array([byte.bit_count() for byte in range(256)], np.uint8)


@dataclass(frozen=True)
class RoundExploration:
    """Figures of one round, by size (share g of the entries that a submodel holds) and by lag (h rounds).

    Attributes:
        exploration: Fraction of the entries that size g has held so far in a round with a participant of that
            size.
        ever_trained: Fraction of the entries that any size has held so far in a round with a participant of that
            size.
        difference: size(M_g(t) xor M_g(t-h)) / (2 k_g) by size and lag: 0 for equal masks, 1 for disjoint ones.
            Lags that reach back before the first round are left out.
    """

    exploration: Mapping[float, float]
    ever_trained: float
    difference: Mapping[float, Mapping[int, float]]


class MaskExploration:
    """Accumulator of the masks of each round, which :meth:`add` turns into figures.

    Stores one bit per entry, size and round, back to the longest of ``lags``.
    """

    def __init__(self, lags: Sequence[int] = (1, 50)) -> None:
        if not lags or min(lags) < 1:
            raise ModelError(f"a difference looks at least one round back, found lags {lags}", lags=lags)
        self._lags = tuple(lags)
        self._entries = 0
        self._explored: dict[float, Packed] = {}
        self._ever: Packed | None = None
        self._past: dict[float, deque[Packed]] = {}

    def add(
        self, masks: Mapping[float, Mapping[str, Mask]], participating: Collection[float]
    ) -> RoundExploration:
        """Add the masks of the next round, and return its figures.

        Args:
            masks: Masks by size and tensor name, of the same sizes and tensors in every round.
            participating: Sizes that had a participant in this round.

        Raises:
            ModelError: Sizes or tensors differ from earlier rounds, or a participating size has no mask.
        """
        self._check(masks, participating)
        packed = {size: _pack(tensors) for size, tensors in masks.items()}
        for size, bits in packed.items():
            explored = self._explored.setdefault(size, np.zeros_like(bits))
            self._ever = np.zeros_like(bits) if self._ever is None else self._ever
            if size in participating:
                explored |= bits
                self._ever |= bits
            self._past.setdefault(size, deque(maxlen=max(self._lags) + 1)).append(bits)
        return RoundExploration(
            {size: self._fraction(self._explored[size]) for size in packed},
            self._fraction(self._ever),
            {size: self._differences(size) for size in packed},
        )

    def _fraction(self, bits: Packed | None) -> float:
        return 0.0 if bits is None else _count(bits) / self._entries

    def _differences(self, size: float) -> dict[int, float]:
        past = self._past[size]
        now = past[-1]
        return {
            lag: _count(now ^ past[-1 - lag]) / (2 * _count(now)) for lag in self._lags if lag < len(past)
        }

    def _check(self, masks: Mapping[float, Mapping[str, Mask]], participating: Collection[float]) -> None:
        if not masks or (self._past and set(masks) != set(self._past)):
            raise ModelError(
                f"each round gives masks of the sizes {sorted(self._past)}, found {sorted(masks)}",
                sizes=sorted(masks),
            )
        unknown = sorted(set(participating) - set(masks))
        if unknown:
            raise ModelError(
                f"a participant has size {unknown[0]}, whose mask is missing; there are {sorted(masks)}",
                size=unknown[0],
            )
        for size, tensors in masks.items():
            entries = sum(mask.size for mask in tensors.values())
            self._entries = self._entries or entries
            if entries != self._entries:
                raise ModelError(
                    f"the masks of size {size} have {entries} entries, those before them {self._entries}; give masks of "
                    "the same tensors in every round",
                    size=size,
                    entries=entries,
                )


def _pack(tensors: Mapping[str, Mask]) -> Packed:
    return np.packbits(np.concatenate([tensors[name].reshape(-1) for name in sorted(tensors)]))


def _count(bits: Packed) -> int:
    return int(_ONES[bits].sum(dtype=np.int64))


def per_size(results: Iterable[tuple[float, float]]) -> dict[float, float]:
    """Return the column ``Model (g)`` of the paper: the mean accuracy of each size's clients, by size, ascending.

    ``results`` has one pair (size, accuracy) per client.
    """
    by_size: dict[float, list[float]] = {}
    for size, accuracy in results:
        by_size.setdefault(size, []).append(accuracy)
    return {size: fmean(by_size[size]) for size in sorted(by_size)}


def local_metric(results: Iterable[tuple[float, float]]) -> float:
    """Return the column ``Local``: the mean of the per-size means, which is the mean over clients if groups are equal.

    ``results`` has one pair per client: its size, and the accuracy of that size's submodel on the client's test shard.
    """
    return fmean(per_size(results).values())


def global_metric(accuracies: Mapping[float, float]) -> float:
    """Return the column ``Global``: the mean of ``accuracies``, which has each size's accuracy on the union of the test
    shards.
    """
    return fmean(accuracies.values())
