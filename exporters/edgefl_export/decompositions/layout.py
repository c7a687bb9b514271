"""Layout: transposes, squeezes, views and in-place writes in the form that ONNX takes."""

from __future__ import annotations

import torch
from torch import Tensor

from edgefl_export.decompositions.rule import DECLINED, Rules

_aten = torch.ops.aten

# Layout: transposes and squeezes in the form ONNX takes them, and what in-place writes become.


def squeeze_dims(x: Tensor, dims: list[int]) -> Tensor:
    """Drop the listed axes of length one."""
    drop = {dim % x.dim() for dim in dims if x.shape[dim] == 1}
    return x.view([size for axis, size in enumerate(x.shape) if axis not in drop])


def transpose_matrix(x: Tensor) -> Tensor:
    """``x.t()`` as a permutation (ONNX Transpose); vectors stay."""
    return x.permute(1, 0) if x.dim() == 2 else x


def copy(destination: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """Return the result of ``destination.copy_(source)``: the source in the shape and dtype of the destination."""
    source = source.to(destination.dtype)
    return source if source.shape == destination.shape else source.expand(destination.shape)


def fill(destination: Tensor, value: float) -> Tensor:
    """Return the result of ``destination.fill_(value)``; the destination, often an empty tensor, is not read."""
    return torch.full(destination.shape, value, dtype=destination.dtype)


def split_with_sizes(x: Tensor, sizes: list[int], dim: int = 0) -> list[Tensor]:
    """Consecutive parts as slices; torch.onnx makes a sequence of them, which few runtimes handle well."""
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    return [
        _aten.slice.Tensor(x, dim, start, start + size) for start, size in zip(starts, sizes, strict=True)
    ]


def split(x: Tensor, size: int, dim: int = 0) -> list[Tensor]:
    """Parts of ``size``, the last one shorter if it must be."""
    length = x.shape[dim]
    return split_with_sizes(x, [min(size, length - start) for start in range(0, length, size)], dim)


# Views: what the first pass could view in place, in the memory layout that the second pass gives it.


def view(x: Tensor, size: list[int]) -> Tensor:
    """``x.view(size)``; of a copy in memory order where ``x`` is not contiguous.

    A rule may give its result other strides than the op had (a channels-last convolution becomes matrix products),
    and a view that was recorded behind it then fits no more. ONNX knows no strides, so the copy costs nothing there.
    """
    return DECLINED if x.is_contiguous() else x.contiguous().view(size)


RULES: Rules = {
    _aten.copy.default: copy,
    _aten.fill.Scalar: fill,
    _aten.split.Tensor: split,
    _aten.split_with_sizes.default: split_with_sizes,
    _aten.squeeze.dims: squeeze_dims,
    _aten.t.default: transpose_matrix,
    _aten.view.default: view,
}
