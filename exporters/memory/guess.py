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
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from edgefl.models.spec import on_meta, without_values
from edgefl.submodels.channels.trace import plain_attention
from edgefl.submodels.submodel import Submodel

NEAR = 1.15
"""A guess this many times away from what a device has, up or down, is far."""

_ROWS = 2
_WEIGHT_COPIES = 3
"""Weights, their gradients, and what the optimizer keeps of them."""


def step_bytes(submodel: Submodel, batch: int) -> int:
    """Bytes of what the trained units of ``submodel`` compute for ``batch`` rows in a forward pass, and of their weights
    with all that a step has of the same size. More of it means more memory; how much more, a trace says."""
    module, sample = on_meta(submodel.suffix).eval(), submodel.boundary
    weights = sum(tensor.nbytes for tensor in module.parameters())
    x = torch.empty((_ROWS, *sample.shape), dtype=sample.dtype, device="meta")
    results = _Weighing()
    with without_values(module), plain_attention(), results:
        module(x)
    return results.nbytes * batch // _ROWS + _WEIGHT_COPIES * weights


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


class _Weighing(TorchDispatchMode):
    """Adds up the results of all ops."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nbytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        results = func(*args, **(kwargs or {}))
        self.nbytes += sum(each.nbytes for each in tree_leaves(results) if isinstance(each, torch.Tensor))
        return results
