"""Linear maps of single axes by matrices that are computed in the graph.

Such a matrix is sparse and regular, and may have more entries than the model has weights. Written as a comparison of
positions it takes a few numbers in the file, and runtimes fold it once, when they load.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def along(x: Tensor, axis: int, matrix: Tensor) -> Tensor:
    """y[.., j, ..] = sum_i x[.., i, ..] matrix[i, j] along ``axis``; not contiguous unless that is the last one.

    As one product of two matrices: a batched one would repeat the matrix for each plane.
    """
    moved = x.movedim(axis, -1)
    y = moved.reshape(-1, matrix.shape[0]) @ matrix
    return y.view(*moved.shape[:-1], matrix.shape[1]).movedim(-1, axis)


def windows(spans: Sequence[tuple[int, int]], size: int, dtype: torch.dtype) -> Tensor:
    """[windows, size] with 1 from the first to before the last position of each span, which may lie outside."""
    starts, stops = column([start for start, _ in spans]), column([stop for _, stop in spans])
    place = torch.arange(size)
    return ((starts <= place) & (place < stops)).to(dtype)


def taps(rows: Sequence[Sequence[tuple[int, float]]], size: int, dtype: torch.dtype) -> Tensor:
    """[rows, size] with the weights of each row's (position, weight) pairs, as many in each, added up."""
    total = torch.zeros((), dtype=dtype)
    for pairs in zip(*rows, strict=True):
        chosen = column([place for place, _ in pairs]) == torch.arange(size)
        total = total + chosen.to(dtype) * column([weight for _, weight in pairs], dtype)
    return total


def column(values: Sequence[float], dtype: torch.dtype = torch.int64) -> Tensor:
    """[values, 1]."""
    return torch.tensor(values, dtype=dtype).unsqueeze(1)
