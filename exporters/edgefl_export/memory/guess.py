"""Choice of the sizes of a submodel kind that are traced, if a device names its memory.

Memory rises or falls with the size. So sizes between two traced ones on the same side of the device's memory are on that
side too, unless a guess puts them near it. Between two on different sides the search continues at the size with the nearest
guess. A guess follows :func:`step_bytes`, which needs a run without values and no graph::

    while (at := next_traced(bytes_of_sizes, peaks, memory)) is not None:
        peaks[at] = traced(at)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from edgefl.submodels.cost import Forwards
from edgefl.submodels.submodel import Submodel

NEAR = 1.15
"""A guess this many times away from what a device has, up or down, is far."""

_WEIGHT_COPIES = 3
"""Weights, their gradients, and what the optimizer keeps of them."""


def step_bytes(submodel: Submodel, batch: int, forwards: Forwards) -> int:
    """Return the bytes of all results of a forward pass through the trained units, and of the weights with their copies.

    More of them means more memory; only a trace returns how much.
    """
    weights = sum(tensor.nbytes for tensor in submodel.suffix.parameters())
    return int(forwards.of(submodel.suffix, submodel.boundary).nbytes * batch) + _WEIGHT_COPIES * weights


def guessed(sizes: Sequence[int], peaks: Mapping[int, int]) -> list[int]:
    """Return the peak of each size, in order.

    Known ``peaks``, by place, are kept; the first and the last must be among them. Others are interpolated between their
    neighbours by ``sizes`` (:func:`step_bytes`).
    """
    guesses = dict(peaks)
    for before, after in pairwise(sorted(peaks)):
        for at in range(before + 1, after):
            guesses[at] = int(
                peaks[after] + _share(sizes, before, at, after) * (peaks[before] - peaks[after])
            )
    return [guesses[at] for at in range(len(sizes))]


def next_traced(sizes: Sequence[int], peaks: Mapping[int, int], memory: int) -> int | None:
    """Return the place of the size to trace next, or None.

    The first and the last size come first, then one between two of which one fits into ``memory``, then sizes near it.
    """
    for end in (0, len(sizes) - 1):
        if end not in peaks:
            return end
    guesses = guessed(sizes, peaks)
    between = [
        at
        for before, after in pairwise(sorted(peaks))
        if (peaks[before] <= memory) != (peaks[after] <= memory)
        for at in range(before + 1, after)
    ]
    near = [
        at for at, guess in enumerate(guesses) if at not in peaks and memory / NEAR <= guess <= memory * NEAR
    ]
    return min(between or near, key=lambda at: abs(guesses[at] - memory), default=None)


def _share(sizes: Sequence[int], before: int, at: int, after: int) -> float:
    """Return the position of ``at`` between its neighbours, from 1 at the one before to 0 at the one after."""
    if not (whole := sizes[before] - sizes[after]):
        return (after - at) / (after - before)
    return min(1.0, max(0.0, (sizes[at] - sizes[after]) / whole))
