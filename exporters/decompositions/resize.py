"""Resizing in one and two dimensions: to the nearest pixel, and all gradients. Tensors are [N, C, W] or [N, C, H, W].

Resizing is linear and separable, y = A_H x A_W^T, so that dL/dx = A_H^T dL/dy A_W. Row i of a matrix A holds the
weights with which output i reads the inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

_aten = torch.ops.aten

# Row of output i: the inputs it reads (possibly out of range: the border stands in) and their weights.
Row = dict[int, float]
CUBIC = -0.75


def nearest(x: Tensor, output_size: Sequence[int], *scales: float | None) -> Tensor:
    """y[i] = x[floor(i * step)] along each axis: repeated blocks for a whole factor, else picked."""
    size = tuple(x.shape[2:])
    if _whole(size, output_size, scales):
        parts = [part for n in size for part in (n, 1)]
        blocks = [part for n, m in zip(size, output_size, strict=True) for part in (n, m // n)]
        lead = x.shape[:2]
        return x.reshape(*lead, *parts).expand(*lead, *blocks).reshape(*lead, *output_size)
    for axis, (n, m, scale) in enumerate(zip(size, output_size, _filled(scales, size), strict=True), start=2):
        step = _step(n, m, scale)
        x = x.index_select(axis, torch.tensor([min(_nearest(i, step), n - 1) for i in range(m)]))
    return x


def nearest_backward(
    grad: Tensor, output_size: Sequence[int], input_size: Sequence[int], *scales: float | None
) -> Tensor:
    """dL/dx[q] = sum of dL/dy over the outputs that copied q: block sums for a whole factor, else by matrices."""
    size = tuple(input_size[2:])
    if _whole(size, output_size, scales):
        blocks = [part for n, m in zip(size, output_size, strict=True) for part in (n, m // n)]
        inner = [3 + 2 * axis for axis in range(len(size))]
        return grad.reshape(*grad.shape[:2], *blocks).sum(inner)
    return _adjoint(grad, size, scales, lambda i, n, step: {_nearest(i, step): 1.0}, False)


def linear_backward(
    grad: Tensor,
    output_size: Sequence[int],
    input_size: Sequence[int],
    align_corners: bool,
    *scales: float | None,
) -> Tensor:
    """The adjoint of linear interpolation between the two neighbours of each output's position."""

    def row(i: int, n: int, step: float) -> Row:
        at = i * step if align_corners else max((i + 0.5) * step - 0.5, 0.0)
        left = math.floor(at)
        return {left: 1 - (at - left), left + 1: at - left}

    return _adjoint(grad, input_size[2:], scales, row, align_corners)


def cubic_backward(
    grad: Tensor,
    output_size: Sequence[int],
    input_size: Sequence[int],
    align_corners: bool,
    *scales: float | None,
) -> Tensor:
    """The adjoint of cubic convolution over the four neighbours of each output's position (Keys 1981, a = -0.75)."""

    def row(i: int, n: int, step: float) -> Row:
        at = i * step if align_corners else (i + 0.5) * step - 0.5
        left = math.floor(at)
        return {left + k: _cubic(abs(at - left - k)) for k in (-1, 0, 1, 2)}

    return _adjoint(grad, input_size[2:], scales, row, align_corners)


def _adjoint(
    grad: Tensor,
    size: Sequence[int],
    scales: Sequence[float | None],
    row: Callable[[int, int, float], Row],
    align_corners: bool,
) -> Tensor:
    """A_H^T dL/dy A_W, contiguous."""
    matrices = [
        _matrix(n, m, _step(n, m, scale, align_corners), row, grad.dtype)
        for n, m, scale in zip(size, grad.shape[2:], _filled(scales, size), strict=True)
    ]
    moved = grad @ matrices[-1]
    if len(matrices) == 1:
        return moved
    return (moved.transpose(-1, -2) @ matrices[0]).transpose(-1, -2).contiguous()


def _matrix(n: int, m: int, step: float, row: Callable[[int, int, float], Row], dtype: torch.dtype) -> Tensor:
    """[m, n] from the rows; an input beyond the border is the border."""
    dense = [[0.0] * n for _ in range(m)]
    for i in range(m):
        for j, weight in row(i, n, step).items():
            dense[i][min(max(j, 0), n - 1)] += weight
    return torch.tensor(dense, dtype=dtype)


def _whole(size: Sequence[int], output_size: Sequence[int], scales: Sequence[float | None]) -> bool:
    """Whether each input is copied to a block of its own."""
    axes = zip(size, output_size, _filled(scales, size), strict=True)
    return all(m % n == 0 and (not scale or scale == m / n) for n, m, scale in axes)


def _filled(scales: Sequence[float | None], size: Sequence[int]) -> list[float | None]:
    """One scale per axis: the trace leaves out those at the end that are not given."""
    return [*scales, *[None] * (len(size) - len(scales))]


def _step(n: int, m: int, scale: float | None, align_corners: bool = False) -> float:
    """Inputs per output, as torch computes it."""
    if align_corners:
        return (n - 1) / (m - 1) if m > 1 else 0.0
    return 1 / scale if scale else n / m


def _nearest(i: int, step: float) -> int:
    """Rounded as torch does it, in float32: at a whole position one bit decides."""
    return int(np.floor(np.float32(i) * np.float32(step)))


def _cubic(d: float) -> float:
    """Weight of a neighbour at distance d in [0, 2]."""
    if d <= 1:
        return ((CUBIC + 2) * d - (CUBIC + 3)) * d * d + 1
    return ((d - 5) * d + 8) * d * CUBIC - 4 * CUBIC


RULES = {
    _aten.upsample_nearest1d.default: nearest,
    _aten.upsample_nearest2d.default: nearest,
    _aten.upsample_nearest1d_backward.default: nearest_backward,
    _aten.upsample_nearest2d_backward.default: nearest_backward,
    _aten.upsample_linear1d_backward.default: linear_backward,
    _aten.upsample_bilinear2d_backward.default: linear_backward,
    _aten.upsample_bicubic2d_backward.default: cubic_backward,
}
