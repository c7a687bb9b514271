"""Pooling over three axes. Tensors are [N, C, D, H, W] or [C, D, H, W], float32."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from exporters.decompositions.pooling import (
    adaptive_matrix,
    adaptive_max_pool,
    counts,
    end_padding,
    in_padded,
    moves_of,
    pooled,
    spans_of,
    to_positions,
)
from exporters.decompositions.rule import DECLINED, Rules
from exporters.decompositions.separable import along, column, windows

_aten = torch.ops.aten


def max_pool3d(
    x: Tensor,
    kernel: list[int],
    stride: list[int] | None = None,
    padding: list[int] | None = None,
    dilation: list[int] | None = None,
    ceil_mode: bool = False,
) -> tuple[Tensor, Tensor]:
    """The op stays, but in ceil mode, in which runtimes count windows differently: the input gets entries of -inf at its
    end then, and each position loses those it has counted."""
    if not ceil_mode:
        return DECLINED
    moves = moves_of(3, kernel, stride, padding, dilation)
    axes = zip(x.shape[-3:], *moves, strict=True)
    ends = [end_padding(size, k, s, p, d, ceil_mode) for size, k, s, p, d in axes]
    return in_padded(x, moves, ends, _aten.max_pool3d_with_indices)


def max_pool3d_backward(
    grad: Tensor,
    x: Tensor,
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    ceil_mode: bool,
    indices: Tensor,
) -> Tensor:
    """dL/dx[q] = sum of dL/dy[p] over windows p whose maximum lies at q (``indices``, flat in D * H * W)."""
    return to_positions(grad, x, indices, 3)


def avg_pool3d(
    x: Tensor,
    kernel: list[int],
    stride: list[int] | None = None,
    padding: list[int] | None = None,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor: int | None = None,
) -> Tensor:
    """y = x times A_D, A_H and A_W, each along its axis: row i of A averages window i of that axis."""
    return _along_all(x, _averages(x, kernel, stride, padding, ceil_mode, count_include_pad, divisor))


def avg_pool3d_backward(
    grad: Tensor,
    x: Tensor,
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor: int | None,
) -> Tensor:
    """dL/dx is dL/dy times the transposed matrices."""
    matrices = _averages(x, kernel, stride, padding, ceil_mode, count_include_pad, divisor)
    return _along_all(grad, [matrix.t() for matrix in matrices])


def adaptive_avg_pool3d(x: Tensor, output_size: list[int]) -> Tensor:
    """As :func:`avg_pool3d`, of windows floor(i n / m) .. ceil((i + 1) n / m)."""
    sizes = zip(x.shape[-3:], output_size, strict=True)
    return _along_all(x, [adaptive_matrix(size, count, x) for size, count in sizes])


def adaptive_avg_pool3d_backward(grad: Tensor, x: Tensor) -> Tensor:
    """dL/dx is dL/dy times the transposed matrices."""
    sizes = zip(x.shape[-3:], grad.shape[-3:], strict=True)
    return _along_all(grad, [adaptive_matrix(size, count, x).t() for size, count in sizes])


def _averages(
    x: Tensor,
    kernel: list[int],
    stride: list[int] | None,
    padding: list[int] | None,
    ceil_mode: bool,
    include_pad: bool,
    divisor: int | None,
) -> list[Tensor]:
    """[windows, size] for each axis; the number of entries of a window is the product of those along its axes."""
    moves = moves_of(3, kernel, stride, padding)[:3]
    matrices = []
    for axis, (size, k, s, p) in enumerate(zip(x.shape[-3:], *moves, strict=True)):
        spans = spans_of(size, pooled(size, k, s, p, 1, ceil_mode), k, s, p)
        entries = counts(spans, size, include_pad)
        if divisor:
            entries = [divisor if axis == 0 else 1] * len(spans)
        matrices.append(windows(spans, size, x.dtype) / column(entries, x.dtype))
    return matrices


def _along_all(x: Tensor, matrices: list[Tensor]) -> Tensor:
    """x [.., D, H, W] with each axis multiplied by its matrix [new, old]."""
    for axis, matrix in zip((-1, -2, -3), reversed(matrices), strict=True):
        x = along(x, axis, matrix.t())
    return x.contiguous()


RULES: Rules = {
    _aten.adaptive_max_pool3d.default: partial(adaptive_max_pool, pool=_aten.max_pool3d_with_indices),
    _aten.adaptive_max_pool3d_backward.default: partial(to_positions, axes=3),
    _aten.max_pool3d_with_indices.default: max_pool3d,
    _aten.max_pool3d_with_indices_backward.default: max_pool3d_backward,
    _aten.avg_pool3d.default: avg_pool3d,
    _aten.avg_pool3d_backward.default: avg_pool3d_backward,
    _aten._adaptive_avg_pool3d.default: adaptive_avg_pool3d,
    _aten._adaptive_avg_pool3d_backward.default: adaptive_avg_pool3d_backward,
}
