"""Resizing in one to three dimensions. Tensors are [N, C, W], [N, C, H, W] or [N, C, D, H, W].

Resizing is linear and separable, y = A_H x A_W^T, so that dL/dx = A_H^T dL/dy A_W. Row i of a matrix A holds the
weights with which output i reads the inputs.

A forward stays where ONNX has it. Its Resize takes the step between outputs from the sizes, though, and torch takes it
from the scale that the user gave: 7 pixels times 1.3 are 9 pixels, 1 / 1.3 apart and not 7 / 9.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from edgefl_export.decompositions.pooling import along, taps
from edgefl_export.operators import DECLINED, Rules, aten_ops

_aten = torch.ops.aten

# Row of output i: the inputs it reads (possibly out of range: clamped to the border) and their weights.
Row = list[tuple[int, float]]
RowOf = Callable[[int, float], Row]  # of output i at i times the step
CUBIC = -0.75


def nearest(x: Tensor, output_size: Sequence[int], *scales: float | None) -> Tensor:
    """Compute y[i] = x[floor(i * step)] along each axis: repeated blocks for an integer factor, else picked entries.

    ``scales`` are the factors that the user gave, one per axis; None if only the size was given.
    """
    size = tuple(x.shape[2:])
    if _whole(size, output_size, scales):
        parts = [part for n in size for part in (n, 1)]
        blocks = [part for n, m in zip(size, output_size, strict=True) for part in (n, m // n)]
        lead = x.shape[:2]
        return x.reshape(*lead, *parts).expand(*lead, *blocks).reshape(*lead, *output_size)
    steps = _steps(size, output_size, scales, copied=len(size) == 2)
    for axis, (n, m, step) in enumerate(zip(size, output_size, steps, strict=True), start=2):
        x = x.index_select(axis, torch.tensor([min(_nearest(i, step), n - 1) for i in range(m)]))
    return x


def nearest_backward(
    grad: Tensor, output_size: Sequence[int], input_size: Sequence[int], *scales: float | None
) -> Tensor:
    """Compute dL/dx[q] = sum of dL/dy over the outputs that copied q: block sums for an integer factor, else by matrices."""
    size = tuple(input_size[2:])
    if _whole(size, output_size, scales):
        blocks = [part for n, m in zip(size, output_size, strict=True) for part in (n, m // n)]
        inner = [3 + 2 * axis for axis in range(len(size))]
        return grad.reshape(*grad.shape[:2], *blocks).sum(inner)
    steps = _steps(size, output_size, scales)
    return _adjoint(grad, size, steps, lambda i, step: [(_nearest(i, step), 1.0)])


class Interpolation(ABC):
    """Base class of resizing y = A_H x A_W^T. Row i of a matrix A has the weights of the inputs of output i.

    ``copied``: forward passes copy an axis that keeps its size, whatever its scale.
    """

    copied: bool

    @abstractmethod
    def row(self, i: int, step: float, align_corners: bool) -> Row:
        """Return the inputs that output i of a resized axis is computed from, as (input, weight) pairs.

        They are row i of the axis's matrix. ``step`` is the distance between the inputs of neighbouring outputs.
        """

    def forward(
        self, x: Tensor, output_size: Sequence[int], align_corners: bool, *scales: float | None
    ) -> Tensor:
        """Compute :meth:`product` if the user gave scales that differ from the ratio of the sizes; otherwise return
        NotImplemented (the op is kept).
        """
        steps = _steps(x.shape[2:], output_size, scales, align_corners, self.copied)
        axes = zip(x.shape[2:], output_size, steps, strict=True)
        if align_corners or all(math.isclose(step, n / m) for n, m, step in axes):
            return DECLINED
        return self.product(x, output_size, align_corners, *scales)

    def product(
        self, x: Tensor, output_size: Sequence[int], align_corners: bool, *scales: float | None
    ) -> Tensor:
        """Compute the resized y = A_H x A_W^T by products with the matrices of the axes, for formats that have no
        resizing.
        """
        steps = _steps(x.shape[2:], output_size, scales, align_corners, self.copied)
        return _product(x, output_size, steps, partial(self.row, align_corners=align_corners))

    def backward(
        self,
        grad: Tensor,
        output_size: Sequence[int],
        input_size: Sequence[int],
        align_corners: bool,
        *scales: float | None,
    ) -> Tensor:
        """Compute dL/dx = A_H^T dL/dy A_W, the gradient of resizing y = A_H x A_W^T."""
        size = list(input_size[2:])
        copied = self.copied or size == list(output_size)
        steps = _steps(size, output_size, scales, align_corners, copied)
        return _adjoint(grad, size, steps, partial(self.row, align_corners=align_corners))


class LinearInterpolation(Interpolation):
    """Linear interpolation between the two neighbours of a position."""

    copied = True

    def row(self, i: int, step: float, align_corners: bool) -> Row:
        at = i * step if align_corners else max((i + 0.5) * step - 0.5, 0.0)
        left = math.floor(at)
        return [(left, 1 - (at - left)), (left + 1, at - left)]


class CubicInterpolation(Interpolation):
    """Cubic convolution over the four neighbours of a position (Keys 1981, a = -0.75)."""

    copied = False

    def row(self, i: int, step: float, align_corners: bool) -> Row:
        at = i * step if align_corners else (i + 0.5) * step - 0.5
        left = math.floor(at)
        return [(left + k, _cubic(abs(at - left - k))) for k in (-1, 0, 1, 2)]


def _product(x: Tensor, output_size: Sequence[int], steps: Sequence[float], row: RowOf) -> Tensor:
    """Compute y = A_H x A_W^T, contiguous; ``row(i, step)`` returns row i of a matrix A as (input, weight) pairs."""
    axes = zip(x.shape[2:], output_size, steps, strict=True)
    for axis, (n, m, step) in enumerate(axes, start=2):
        x = along(x, axis, _matrix(n, m, step, row, x.dtype).t())
    return x.contiguous()


def _adjoint(grad: Tensor, size: Sequence[int], steps: Sequence[float], row: RowOf) -> Tensor:
    """Compute dL/dx = A_H^T dL/dy A_W, contiguous; ``row(i, step)`` returns row i of a matrix A as (input, weight)
    pairs.

    ``size`` are the sizes of the resized axes of x.
    """
    for axis, (n, m, step) in enumerate(zip(size, grad.shape[2:], steps, strict=True), start=2):
        grad = along(grad, axis, _matrix(n, m, step, row, grad.dtype))
    return grad.contiguous()


def _matrix(n: int, m: int, step: float, row: RowOf, dtype: torch.dtype) -> Tensor:
    """Return the matrix A [m, n] with row(i, step) as row i; an input beyond the border counts as the border."""
    rows = [[(min(max(j, 0), n - 1), weight) for j, weight in row(i, step)] for i in range(m)]
    return taps(rows, n, dtype)


def _whole(size: Sequence[int], output_size: Sequence[int], scales: Sequence[float | None]) -> bool:
    """Return True if each input is copied to a block of outputs of its own, because the factor of every axis is an
    integer.
    """
    axes = zip(size, output_size, _fill_scales(scales, size), strict=True)
    return all(m % n == 0 and (not scale or scale == m / n) for n, m, scale in axes)


def _fill_scales(scales: Sequence[float | None], size: Sequence[int]) -> list[float | None]:
    """Return one scale per axis, with None for the trailing ones that the trace leaves out."""
    return [*scales, *[None] * (len(size) - len(scales))]


def _steps(
    size: Sequence[int],
    output_size: Sequence[int],
    scales: Sequence[float | None],
    align_corners: bool = False,
    copied: bool = True,
) -> list[float]:
    """Return the distance between the inputs of neighbouring outputs along each axis, as in torch's CPU kernels.

    ``copied``: an axis that keeps its size is copied, whatever the scale. Kernels differ in this from mode to mode, and even
    between a forward pass and its gradient.
    """
    axes = zip(size, output_size, _fill_scales(scales, size), strict=True)
    return [1.0 if copied and n == m else _step(n, m, scale, align_corners) for n, m, scale in axes]


def _step(n: int, m: int, scale: float | None, align_corners: bool) -> float:
    if align_corners:
        return (n - 1) / (m - 1) if m > 1 else 0.0
    return 1 / scale if scale else n / m


def _nearest(i: int, step: float) -> int:
    """Return floor(i * step), rounded in float32 as in torch, because at an integer position one bit decides."""
    return int(np.floor(np.float32(i) * np.float32(step)))


def _cubic(d: float) -> float:
    """Return the weight of a neighbour at distance d in [0, 2]."""
    if d <= 1:
        return ((CUBIC + 2) * d - (CUBIC + 3)) * d * d + 1
    return ((d - 5) * d + 8) * d * CUBIC - 4 * CUBIC


LINEAR, KEYS = LinearInterpolation(), CubicInterpolation()

RULES: Rules = {
    **dict.fromkeys(aten_ops("upsample_nearest1d upsample_nearest2d upsample_nearest3d"), nearest),
    **dict.fromkeys(
        aten_ops("upsample_nearest1d_backward upsample_nearest2d_backward upsample_nearest3d_backward"),
        nearest_backward,
    ),
    **dict.fromkeys(aten_ops("upsample_linear1d upsample_bilinear2d upsample_trilinear3d"), LINEAR.forward),
    **dict.fromkeys(
        aten_ops("upsample_linear1d_backward upsample_bilinear2d_backward upsample_trilinear3d_backward"),
        LINEAR.backward,
    ),
    _aten.upsample_bicubic2d.default: KEYS.forward,
    _aten.upsample_bicubic2d_backward.default: KEYS.backward,
}
