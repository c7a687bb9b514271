"""Layout: transposes and squeezes in the form ONNX takes them, and what in-place writes become."""

from __future__ import annotations

import torch
from torch import Tensor

_aten = torch.ops.aten


def squeeze_dims(x: Tensor, dims: list[int]) -> Tensor:
    """Drop the listed axes of length one."""
    drop = {dim % x.dim() for dim in dims if x.shape[dim] == 1}
    return x.view([size for axis, size in enumerate(x.shape) if axis not in drop])


def transpose_matrix(x: Tensor) -> Tensor:
    """``x.t()`` as a permutation (ONNX Transpose); vectors stay."""
    return x.permute(1, 0) if x.dim() == 2 else x


def copy(destination: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """What ``destination.copy_(source)`` leaves: the source in the shape and dtype of the destination."""
    source = source.to(destination.dtype)
    return source if source.shape == destination.shape else source.expand(destination.shape)


def fill(destination: Tensor, value: float) -> Tensor:
    """What ``destination.fill_(value)`` leaves; the destination itself, often an empty tensor, is not read."""
    return torch.full(destination.shape, value, dtype=destination.dtype)


RULES = {
    _aten.copy.default: copy,
    _aten.fill.Scalar: fill,
    _aten.squeeze.dims: squeeze_dims,
    _aten.t.default: transpose_matrix,
}
