"""Pooling as maxima and sums of slices, channels last, and gradients that are put back without positions.

A maximum's gradient goes to the first entry of the window that equals it, as in torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from edgefl_export.decompositions import pooling as plain
from edgefl_export.decompositions.pooling import Windows
from edgefl_export.decompositions.rule import Rules
from edgefl_export.executorch.rules.activation import step
from edgefl_export.executorch.rules.dense import Moves
from edgefl_export.executorch.rules.shifts import place, taps, total

_aten = torch.ops.aten
_LAST, _FIRST = (0, 2, 3, 1), (0, 3, 1, 2)

MOST_PLACES = 64
"""Of a window, each of which is some nodes: larger ones run on kernels."""


def max_pool2d(x: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    """y = max over each window, with its place in the plane, which nothing is left of unless somebody reads it."""
    where = Windows.of(2, *args)
    if not _covered(x, where):
        return plain.max_pool2d(x, *args)
    moves = _moves(where)
    image = x.permute(_LAST)
    parts = windows_of(image, where.kernel, moves)
    positions = torch.arange(x.shape[2] * x.shape[3]).view(1, x.shape[2], x.shape[3], 1)
    ranks = windows_of(positions.expand(image.shape).contiguous(), where.kernel, moves)
    best, places = first_maximum(_flat(parts), _flat(ranks))
    return best.permute(_FIRST), places.permute(_FIRST)


def max_pool2d_backward(grad: Tensor, x: Tensor, *args: Any) -> Tensor:
    """dL/dx[q] = sum of dL/dy[p] over windows p whose first maximum is x[q]."""
    where = Windows.of(2, *args[:-1])
    if not _covered(x, where):
        return plain.max_pool2d_backward(grad, x, *args)
    moves = _moves(where)
    image, grad = x.permute(_LAST), grad.permute(_LAST)
    shares = rows_of(shared(grad, _flat(windows_of(image, where.kernel, moves))), where.kernel[1])
    return place(shares, image.shape[1:3], moves.all_met(where.kernel)).permute(_FIRST)


def avg_pool2d(x: Tensor, *args: Any) -> Tensor:
    """y = sum over each window / its size."""
    where = Windows.of_average(2, *args)
    if not _covered(x, where):
        return plain.avg_pool2d(x, *args)
    parts = windows_of(x.permute(_LAST), where.kernel, _moves(where))
    return (total(_flat(parts), ()) * _share(where)).permute(_FIRST)


def avg_pool2d_backward(grad: Tensor, x: Tensor, *args: Any) -> Tensor:
    """dL/dx[q] = sum of dL/dy[p] / the size of a window, over windows p that hold q."""
    where = Windows.of_average(2, *args)
    if not _covered(x, where):
        return plain.avg_pool2d_backward(grad, x, *args)
    tall, wide = where.kernel
    share = grad.permute(_LAST) * _share(where)
    return place([[share] * wide] * tall, x.shape[2:], _moves(where).all_met(where.kernel)).permute(_FIRST)


def _share(where: Windows) -> float:
    return 1.0 / (where.divisor or math.prod(where.kernel))


def _covered(x: Tensor, where: Windows) -> bool:
    plain_sides = not any(where.padding) and not where.ceil_mode and math.prod(where.kernel) <= MOST_PLACES
    return x.dim() == 4 and plain_sides and x.dtype == torch.float32


def _moves(where: Windows) -> Moves:
    return Moves((where.stride[0], where.stride[1]), (0, 0), (where.dilation[0], where.dilation[1]))


def windows_of(image: Tensor, kernel: Sequence[int], moves: Moves) -> list[list[Tensor]]:
    """[KH][KW] of [N, H', W', C]: the entries of all windows at one place of them."""
    height, width = moves.outputs(image, (kernel[0], kernel[1]))
    rows = taps(image, 1, kernel[0], height, moves.stride[0], 0, moves.dilation[0])
    return [taps(row, 2, kernel[1], width, moves.stride[1], 0, moves.dilation[1]) for row in rows]


def _flat(parts: list[list[Tensor]]) -> list[Tensor]:
    return [part for row in parts for part in row]


def rows_of(parts: Sequence[Tensor], wide: int) -> list[list[Tensor]]:
    """The inverse of flattening rows of ``wide`` parts."""
    return [list(parts[start : start + wide]) for start in range(0, len(parts), wide)]


def first_maximum(parts: Sequence[Tensor], ranks: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The largest of all parts, entry by entry, and the rank (int64) of the first part that has it."""
    best = _maximum(parts)
    where, left = torch.zeros((), dtype=torch.int64), torch.ones(())
    for value, rank in zip(parts, ranks, strict=True):
        rest = left * step(best - value)
        where = where + rank * (left - rest).to(torch.int64)
        left = rest
    return best, where


def shared(grad: Tensor, parts: Sequence[Tensor]) -> list[Tensor]:
    """``grad`` where a part is the first that has the largest entry of all, else 0, for each part."""
    best, left, zero = _maximum(parts), grad, torch.zeros((), dtype=grad.dtype)
    shares = []
    for value in parts:
        lower = best > value
        shares.append(torch.where(lower, zero, left))
        left = torch.where(lower, left, zero)  # entries after the first maximum
    return shares


def _maximum(parts: Sequence[Tensor]) -> Tensor:
    first, *rest = parts
    for part in rest:
        first = torch.maximum(first, part)
    return first


RULES: Rules = {
    _aten.avg_pool2d.default: avg_pool2d,
    _aten.avg_pool2d_backward.default: avg_pool2d_backward,
    _aten.max_pool2d_with_indices.default: max_pool2d,
    _aten.max_pool2d_with_indices_backward.default: max_pool2d_backward,
}
