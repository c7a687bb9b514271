"""Products: few rows with a transposed weight, and products of more than two tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from edgefl_export.decompositions.rule import DECLINED, Rules

_aten = torch.ops.aten


# Up to this many rows, the weight's own layout decides how fast a product is.
FEW_ROWS = 64


def mm(a: Tensor, b: Tensor) -> Tensor:
    """a b as (b^T a^T)^T where b is a transposed weight and a has few rows: runtimes repack the right factor.

    A dense layer of 3136 x 2048 takes 4.0 ms instead of 5.8 for 32 rows. Otherwise the op stays.
    """
    if not _few_rows_by_weight(a, b):
        return DECLINED
    return (b.t() @ a.t()).t()


def addmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """bias + a b, with the product as in :func:`mm`."""
    if not _few_rows_by_weight(a, b) or beta != 1 or alpha != 1:
        return DECLINED
    return mm(a, b) + bias


def _few_rows_by_weight(a: Tensor, b: Tensor) -> bool:
    transposed = b.stride(0) == 1 and b.stride(1) > 1
    return transposed and a.shape[0] <= FEW_ROWS and b.shape[1] >= 4 * a.shape[0]


def trilinear(
    a: Tensor,
    b: Tensor,
    c: Tensor,
    expand_a: list[int],
    expand_b: list[int],
    expand_c: list[int],
    sum_dims: list[int],
    unroll_dim: int = 1,
) -> Tensor:
    """y = sum over ``sum_dims`` of a * b * c, after new axes of length one where each is to be expanded."""
    product = _widened(a, expand_a) * _widened(b, expand_b) * _widened(c, expand_c)
    return product.sum(sum_dims) if sum_dims else product


def _widened(x: Tensor, axes: list[int]) -> Tensor:
    for axis in axes:
        x = x.unsqueeze(axis)
    return x


RULES: Rules = {_aten._trilinear.default: trilinear, _aten.addmm.default: addmm, _aten.mm.default: mm}
