"""Products of more than two tensors."""

from __future__ import annotations

import torch
from torch import Tensor

_aten = torch.ops.aten


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


RULES = {_aten._trilinear.default: trilinear}
