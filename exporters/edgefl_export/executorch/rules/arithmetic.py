"""Quotients, reductions and running products for ExecuTorch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from edgefl_export.decompositions import arithmetic as plain
from edgefl_export.decompositions.arithmetic import Number, operands, rules_of
from edgefl_export.decompositions.rule import DECLINED, Rules

_aten = torch.ops.aten

# Quotients of whole numbers for ExecuTorch, which has an exact kernel for those that are rounded down.


def floor_divide(x: Number, y: Number) -> Tensor:
    """Return floor(x / y)."""
    a, b = operands(x, y)
    if a.is_floating_point():
        return plain.floor_divide(a, b)
    return DECLINED if a is x and b is y else torch.floor_divide(a, b)


def divide(x: Number, y: Number, *, rounding_mode: str | None) -> Tensor:
    """Return x / y, rounded down ("floor") or towards zero ("trunc"). A quotient of different signs that is not whole is
    one more than its floor."""
    a, b = operands(x, y)
    if rounding_mode == "floor":
        return floor_divide(a, b) if a.is_floating_point() else torch.floor_divide(a, b)
    if rounding_mode is None or a.is_floating_point():
        return DECLINED
    quotient = torch.floor_divide(a, b)
    return quotient + ((quotient * b != a) & ((a < 0) != (b < 0))).to(a.dtype)


# Reductions and running products for which ExecuTorch has no kernel.


def vector_norm(
    x: Tensor,
    order: float = 2.0,
    dim: Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """(sum |x|^p)^(1/p) over ``dim``, all axes if none are given; the largest or smallest |x| for p = inf or -inf."""
    if dtype not in (None, x.dtype):
        return DECLINED
    axes = list(range(x.dim())) if dim is None else list(dim)
    if order == 2:
        return (x * x).sum(axes, keepdim).sqrt()
    size = x.abs()
    if math.isinf(order):
        return size.amax(axes, keepdim) if order > 0 else size.amin(axes, keepdim)
    if order == 0:
        return (x != 0).to(x.dtype).sum(axes, keepdim)
    if order == 1:
        return size.sum(axes, keepdim)
    return size.pow(order).sum(axes, keepdim).pow(1.0 / order)


def cumprod(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    """y_k = x_0 ... x_k along ``dim``: products over 1, 2, 4, ... entries, each of two existing ones."""
    if dtype is None and not x.is_floating_point():
        x = x.to(torch.int64)
    if dtype not in (None, x.dtype) or not x.dim():
        return DECLINED
    length, shift = x.shape[dim], 1
    while shift < length:
        head = x.narrow(dim, 0, shift)
        x = torch.cat((head, x.narrow(dim, shift, length - shift) * x.narrow(dim, 0, length - shift)), dim)
        shift *= 2
    return x


RULES: Rules = {
    **rules_of("floor_divide", floor_divide),
    _aten.div.Tensor_mode: divide,
    _aten.div.Scalar_mode: divide,
    _aten.cumprod.default: cumprod,
    _aten.linalg_vector_norm.default: vector_norm,
}
