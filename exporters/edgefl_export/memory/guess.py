"""Which sizes of a kind of submodel are worth a trace, where a device says what memory it has.

Of sizes in their order, the need of memory grows or falls with them: between two traced ones on the same side of what the
device has, all are taken to be on that side, unless a guess puts them near it. Between two on different sides the search
goes on, at the size whose guess is nearest. A guess follows :func:`step_bytes`, which needs a run without values and no
graph::

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
    """Return the bytes of a step: all results of a forward pass through the trained units of ``submodel`` for ``batch``
    rows, and the weights with all that a step has of the same size. More of it means more memory; how much more, a trace
    says.
    """
    weights = sum(tensor.nbytes for tensor in submodel.suffix.parameters())
    return int(forwards.of(submodel.suffix, submodel.boundary).nbytes * batch) + _WEIGHT_COPIES * weights


def guessed(sizes: Sequence[int], peaks: Mapping[int, int]) -> list[int]:
    """The peak of each size, in their order. ``peaks``, by place, are those that are known, the first and the last among
    them; others lie between their neighbours, where :func:`step_bytes`, ``sizes``, puts them."""
    guesses = dict(peaks)
    for before, after in pairwise(sorted(peaks)):
        for at in range(before + 1, after):
            guesses[at] = int(
                peaks[after] + _share(sizes, before, at, after) * (peaks[before] - peaks[after])
            )
    return [guesses[at] for at in range(len(sizes))]


def next_traced(sizes: Sequence[int], peaks: Mapping[int, int], memory: int) -> int | None:
    """The place of the size to trace next: the first, the last, then one between two of which one fits into ``memory``, then
    one near it; None where that is all."""
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
    """Where ``at`` lies between its neighbours, from 1 at the one before to 0 at the one after; by its place, where sizes do
    not tell."""
    if not (whole := sizes[before] - sizes[after]):
        return (after - at) / (after - before)
    return min(1.0, max(0.0, (sizes[at] - sizes[after]) / whole))
