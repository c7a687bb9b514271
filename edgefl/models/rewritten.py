"""Functions of torch whose gradients no training graph has a form for, in terms of functions that have one.

A rule takes what the function takes and returns what it returns, or NotImplemented for a case that it leaves to torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn import functional as F

Sizes = int | Sequence[int]


def embedding_bag(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Any:
    """Bags of equal size, (B, L) -> (B, E): rows of ``weight``, reduced by ``mode``; entries that are ``padding_idx`` count
    for nothing, and a bag of nothing else is 0. Bags that ``offsets`` end are torch's."""
    if input.dim() != 2 or offsets is not None or max_norm is not None or scale_grad_by_freq:
        return NotImplemented
    rows = F.embedding(input, weight, padding_idx)
    if padding_idx is None:
        if per_sample_weights is not None:
            rows = rows * per_sample_weights.unsqueeze(-1)
        return rows.max(1).values if mode == "max" else rows.mean(1) if mode == "mean" else rows.sum(1)
    counted = (input != padding_idx % weight.shape[0]).unsqueeze(-1)
    if mode == "max":
        found = rows.masked_fill(~counted, -math.inf).max(1).values
        return found.masked_fill(~counted.any(1), 0.0)
    weights = counted.to(rows.dtype)
    if per_sample_weights is not None:
        weights = weights * per_sample_weights.unsqueeze(-1)
    total = (rows * weights).sum(1)
    return total / counted.sum(1).clamp(min=1).to(rows.dtype) if mode == "mean" else total


def max_pool3d(
    input: Tensor,
    kernel_size: Sizes,
    stride: Sizes | None = None,
    padding: Sizes = 0,
    dilation: Sizes = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    """Maxima of planes, then of what these leave along the depth: of equal ones the first, as torch takes it."""
    if return_indices or input.dim() not in (4, 5):
        return NotImplemented
    options = [_three(each) for each in (kernel_size, stride or kernel_size, padding, dilation)]

    def pool(x: Tensor, axes: list[list[int]]) -> Tensor:
        kernel, strides, ends, spread = axes
        return F.max_pool2d(x, kernel, strides, ends, spread, ceil_mode)

    return _by_planes(input, pool, options, [1, 1, 0, 1])


def avg_pool3d(
    input: Tensor,
    kernel_size: Sizes,
    stride: Sizes | None = None,
    padding: Sizes = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Any:
    """Means of planes, then of these along the depth: the same where every window counts alike in each."""
    if divisor_override or input.dim() not in (4, 5):
        return NotImplemented
    options = [_three(each) for each in (kernel_size, stride or kernel_size, padding)]

    def pool(x: Tensor, axes: list[list[int]]) -> Tensor:
        kernel, strides, ends = axes
        return F.avg_pool2d(x, kernel, strides, ends, ceil_mode, count_include_pad)

    return _by_planes(input, pool, options, [1, 1, 0])


def _by_planes(
    input: Tensor,
    pool: Callable[[Tensor, list[list[int]]], Tensor],
    options: list[list[int]],
    still: list[int],
) -> Tensor:
    """``pool`` over height and width, then over the depth with the options ``still`` along the other axis."""
    x = input if input.dim() == 5 else input.unsqueeze(0)
    batch, channels, depth = x.shape[:3]
    planes = pool(x.reshape(batch, channels * depth, *x.shape[3:]), [each[1:] for each in options])
    height, width = planes.shape[2:]
    deep = [[each[0], none] for each, none in zip(options, still, strict=True)]
    pooled = pool(planes.reshape(batch, channels, depth, height * width), deep)
    out = pooled.reshape(batch, channels, pooled.shape[2], height, width)
    return out if input.dim() == 5 else out.squeeze(0)


def _three(sizes: Sizes) -> list[int]:
    listed = [sizes] if isinstance(sizes, int) else list(sizes)
    return listed * 3 if len(listed) == 1 else listed


RULES: Mapping[str, Callable[..., Any]] = {
    "embedding_bag": embedding_bag,
    "max_pool3d": max_pool3d,
    "avg_pool3d": avg_pool3d,
}
"""By the name of a function in ``torch.nn.functional``."""
