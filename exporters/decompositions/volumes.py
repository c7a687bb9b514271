"""Pooling over three axes. Tensors are [N, C, D, H, W] or [C, D, H, W], float32."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from exporters.decompositions.pooling import (
    Windows,
    adaptive_matrix,
    adaptive_max_pool,
    counts,
    in_padded,
    spans_of,
    to_positions,
)
from exporters.decompositions.rule import DECLINED, Rules
from exporters.decompositions.separable import along, column, windows

_aten = torch.ops.aten


def max_pool3d(x: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    """The op stays, but in ceil mode, in which runtimes count windows differently: the input gets entries of -inf at its
    end then, and each position loses those it has counted."""
    where = Windows.of(3, *args)
    return in_padded(x, where, where.ends(x), _aten.max_pool3d_with_indices) if where.ceil_mode else DECLINED


def max_pool3d_backward(grad: Tensor, x: Tensor, *args: Any) -> Tensor:
    """dL/dx[q] = sum of dL/dy[p] over windows p whose maximum lies at q (``indices``, flat in D * H * W)."""
    return to_positions(grad, x, args[-1], 3)


def avg_pool3d(x: Tensor, *args: Any) -> Tensor:
    """y = x times A_D, A_H and A_W, each along its axis: row i of A averages window i of that axis."""
    return _along_all(x, _averages(x, Windows.of_average(3, *args)))


def avg_pool3d_backward(grad: Tensor, x: Tensor, *args: Any) -> Tensor:
    """dL/dx is dL/dy times the transposed matrices."""
    return _along_all(grad, [matrix.t() for matrix in _averages(x, Windows.of_average(3, *args))])


def adaptive_avg_pool3d(x: Tensor, output_size: list[int]) -> Tensor:
    """As :func:`avg_pool3d`, of windows floor(i n / m) .. ceil((i + 1) n / m)."""
    sizes = zip(x.shape[-3:], output_size, strict=True)
    return _along_all(x, [adaptive_matrix(size, count, x) for size, count in sizes])


def adaptive_avg_pool3d_backward(grad: Tensor, x: Tensor) -> Tensor:
    """dL/dx is dL/dy times the transposed matrices."""
    sizes = zip(x.shape[-3:], grad.shape[-3:], strict=True)
    return _along_all(grad, [adaptive_matrix(size, count, x).t() for size, count in sizes])


def _averages(x: Tensor, where: Windows) -> list[Tensor]:
    """[windows, size] for each axis; the number of entries of a window is the product of those along its axes."""
    matrices = []
    for axis, (size, spans) in enumerate(zip(x.shape[-3:], spans_of(x, where), strict=True)):
        entries = counts(spans, size, where.include_pad)
        if where.divisor:
            entries = [where.divisor if axis == 0 else 1] * len(spans)
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
