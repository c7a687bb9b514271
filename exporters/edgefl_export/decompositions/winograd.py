"""Convolutions with a kernel of 3 x 3 in fewer multiplications: F(2x2, 3x3) of Lavin and Gray, "Fast Algorithms for
Convolutional Neural Networks" (2016).

A tile of 2 x 2 results is read from 4 x 4 inputs, which takes 36 multiplications; with both brought to 16 points, where a
convolution goes entry by entry, it takes 16 (their equation 8)::

    Y = A^T [(G g G^T) . (B^T d B)] A                       dL/dg = sum G^T [(B^T d B) . (A dL/dY A^T)] G

Over channels and samples that is one product at each point, which is what runtimes do best. Both sides of a transform are
one matrix here, the Kronecker product of two, so that a transform is a product, too. The entries lie channels last::

    tiles [16, T, C] x kernels [16, O, C]^T -> [16, T, O]     with T = N P Q / 4

Tiles are four times as large as their image. So each product makes its own, after what it is multiplied with: runtimes would
merge those of two products with one image, and keep them from the first to the second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from edgefl_export.operators import AFTER

_KERNEL, _TILE, _POINTS = (3, 3), 2, 4
_B = ((1, 0, -1, 0), (0, 1, 1, 0), (0, -1, 1, 0), (0, 1, 0, -1))  # transposed
_G = ((1, 0, 0), (0.5, 0.5, 0.5), (0.5, -0.5, 0.5), (0, 0, 1))
_A = ((1, 1, 1, 0), (0, 1, -1, -1))  # transposed
# What an entry of a kernel, and of an image, costs to be brought there, in multiplications of a product (measured on
# AMD EPYC; docs/compiler-inside.md); and how much more must be spared for it.
_KERNEL_COST, _IMAGE_COST, _WORTH = 350, 250, 1.2
_MOST = 1 << 22
"""Numbers of a tiled image, which has four times as many as the image: larger ones would decide a step's peak."""

Matrix = Sequence[Sequence[float]]


@dataclass(frozen=True)
class WinogradPlan:
    """Plan of a 3 x 3 convolution by tiles of 2 x 2 results, which takes fewer multiplications (Winograd).

    It has the sizes of x [N, C, *inputs] and y [N, O, *outputs], and the number of zeros before x on each axis.
    """

    batch: int
    channels: int
    out: int
    inputs: tuple[int, int]
    outputs: tuple[int, int]
    before: tuple[int, int]

    @property
    def tiles(self) -> tuple[int, int]:
        """Number of tiles down and across; the last ones may reach beyond y."""
        return -(-self.outputs[0] // _TILE), -(-self.outputs[1] // _TILE)

    @property
    def pays(self) -> bool:
        """True if the saved multiplications outweigh the additional copies."""
        (height, width), (down, across) = self.outputs, self.tiles
        positions, covered = self.batch * height * width, self.batch * down * across * _TILE**2
        pairs = self.channels * self.out
        spared = pairs * (9 * positions - _POINTS * covered)
        cost = _KERNEL_COST * pairs + _IMAGE_COST * covered * (self.channels + self.out)
        fits = _POINTS * covered * max(self.channels, self.out) <= _MOST
        return fits and spared >= _WORTH * cost

    @property
    def adjoint(self) -> WinogradPlan:
        """Plan of dL/dx as a convolution of dL/dy with the flipped kernel."""
        before = (_KERNEL[0] - 1 - self.before[0], _KERNEL[1] - 1 - self.before[1])
        return WinogradPlan(self.batch, self.out, self.channels, self.outputs, self.inputs, before)


def plan(
    x: Sequence[int], w: Sequence[int], padding: Sequence[int], dtype: torch.dtype
) -> WinogradPlan | None:
    """Return the Winograd plan for shapes x [N, C, H, W] and w [O, C, 3, 3] with stride 1, or None if another form is
    better.
    """
    if tuple(w[2:]) != _KERNEL or dtype != torch.float32 or max(padding) >= min(_KERNEL):
        return None
    (height, width), (top, left) = x[2:], padding
    outputs = height + 2 * top - 2, width + 2 * left - 2
    made = WinogradPlan(x[0], x[1], w[0], (height, width), outputs, (top, left))
    return made if made.pays and made.adjoint.pays else None


def forward(x: Tensor, w: Tensor, sizes: WinogradPlan) -> Tensor:
    """Compute the convolution y [N, O, P, Q] of x [N, C, H, W] and w [O, C, 3, 3]."""
    tiles, kernels = _tiles(AFTER(x, w), sizes), _kernels(AFTER(w, x))
    return _results(torch.bmm(tiles, kernels.transpose(1, 2)), sizes)


def input_gradient(grad: Tensor, w: Tensor, sizes: WinogradPlan) -> Tensor:
    """Compute dL/dx [N, C, H, W] for dL/dy [N, O, P, Q] and w [O, C, 3, 3]; ``sizes`` is the plan of the forward pass."""
    back = sizes.adjoint
    return _results(torch.bmm(_tiles(grad, back), _kernels(AFTER(w, grad), turned=True)), back)


def weight_gradient(grad: Tensor, x: Tensor, sizes: WinogradPlan) -> Tensor:
    """Compute dL/dw [O, C, 3, 3] for dL/dy [N, O, P, Q] and x [N, C, H, W]; ``sizes`` is the plan of the forward pass."""
    points = torch.bmm(_gradients(grad, sizes).transpose(1, 2), _tiles(AFTER(x, grad), sizes))
    kernel = _transform(_transpose(_pairs(_G, _G)), points)
    return kernel.permute(1, 2, 0).reshape(sizes.out, sizes.channels, *_KERNEL)


def _tiles(x: Tensor, sizes: WinogradPlan) -> Tensor:
    """Compute B^T d B, with Winograd's matrix B, for tiles d of 4 x 4, two positions apart: [N, C, H, W] -> [16, T, C]."""
    rows = _pad(x, sizes.before, [_TILE * n + 2 for n in sizes.tiles])
    return _transform(_pairs(_B, _B), _cut(rows, sizes, _POINTS))


def _kernels(w: Tensor, *, turned: bool = False) -> Tensor:
    """Compute G g G^T, with Winograd's matrix G, for kernels g: [O, C, 3, 3] -> [16, O, C]; if ``turned``, for flipped
    kernels.
    """
    side = _G if not turned else tuple(row[::-1] for row in _G)
    return _transform(_pairs(side, side), w.reshape(-1, 9).t().contiguous()).view(-1, *w.shape[:2])


def _gradients(grad: Tensor, sizes: WinogradPlan) -> Tensor:
    """Compute A dL/dY A^T, with Winograd's matrix A, for tiles Y of the result: [N, O, P, Q] -> [16, T, O]."""
    rows = _pad(grad, (0, 0), [_TILE * n for n in sizes.tiles])
    return _transform(_transpose(_pairs(_A, _A)), _cut(rows, sizes, _TILE))


def _results(points: Tensor, sizes: WinogradPlan) -> Tensor:
    """Compute A^T m A, with Winograd's matrix A, for products m of each tile: [16, T, O] -> [N, O, P, Q]."""
    (down, across), (height, width) = sizes.tiles, sizes.outputs
    tiles = sizes.batch * down * across
    parts = _transform(_pairs(_A, _A), points).view(-1, sizes.out)
    places = _sums(
        range(0, tiles, down * across),
        [row % _TILE * _TILE * tiles + row // _TILE * across for row in range(height)],
        [column % _TILE * tiles + column // _TILE for column in range(width)],
    )
    rows = parts.index_select(0, places).view(sizes.batch, height, width, sizes.out)
    return rows.permute(0, 3, 1, 2)


def _cut(rows: Tensor, sizes: WinogradPlan, points: int) -> Tensor:
    """Cut [N, *space, C] into tiles of ``points`` a side, two positions apart: [points^2, T, C]."""
    (down, across), (_, height, width, channels) = sizes.tiles, rows.shape
    places = _sums(
        range(0, points * width, width),
        range(points),
        range(0, sizes.batch * height * width, height * width),
        range(0, down * _TILE * width, _TILE * width),
        range(0, across * _TILE, _TILE),
    )
    return rows.reshape(-1, channels).index_select(0, places).view(points**2, -1, channels)


def _sums(*axes: Sequence[int]) -> Tensor:
    """Return all sums of one number of each of ``axes``, flat, the first axis slowest; a runtime computes them at load."""
    sums = torch.tensor([0])
    for numbers in axes:
        sums = (sums.unsqueeze(1) + torch.tensor([*numbers])).reshape(-1)
    return sums


def _transform(matrix: Matrix, points: Tensor) -> Tensor:
    """Multiply ``matrix`` [R, S] with points [S, ...]: [R, ...]."""
    made = torch.tensor(matrix, dtype=torch.float32) @ points.reshape(points.shape[0], -1)
    return made.view(-1, *points.shape[1:])


def _pad(images: Tensor, before: Sequence[int], space: Sequence[int]) -> Tensor:
    """Return images [N, C, H, W] as [N, *space, C], with ``before`` zeros in front of each spatial axis, and zeros
    behind to fill ``space``.
    """
    pads = [0, 0]
    for first, size, whole in reversed([*zip(before, images.shape[2:], space, strict=True)]):
        pads += [first, whole - size - first]
    rows = images.permute(0, 2, 3, 1)
    if not any(pads):
        return rows
    padded: Tensor = torch.ops.aten.constant_pad_nd(rows, pads, 0.0)
    return padded


def _pairs(left: Matrix, right: Matrix) -> Matrix:
    """Return the Kronecker product of two matrices.

    It maps the entries of a matrix d, row by row, to those of ``left`` d ``right``^T.
    """
    return tuple(tuple(a * b for a in upper for b in lower) for upper in left for lower in right)


def _transpose(matrix: Matrix) -> Matrix:
    return tuple(zip(*matrix, strict=True))
