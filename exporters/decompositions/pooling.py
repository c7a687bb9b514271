"""Pooling forwards that ONNX lacks, and gradients. Tensors are [N, C, H, W] or [C, H, W], float32."""

from __future__ import annotations

import torch
from torch import Tensor

_aten = torch.ops.aten


def max_pool2d_backward(
    grad: Tensor,
    x: Tensor,
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    ceil_mode: bool,
    indices: Tensor,
) -> Tensor:
    """dL/dx[n, c, q] = sum of dL/dy[n, c, p] over windows p whose maximum lies at q (``indices``, flat in H * W)."""
    planes = x.shape[:-2].numel()
    area = x.shape[-2] * x.shape[-1]
    empty = torch.zeros((planes, area), dtype=grad.dtype)
    return empty.scatter_add(1, indices.reshape(planes, -1), grad.reshape(planes, -1)).view(x.shape)


def avg_pool2d_backward(
    grad: Tensor,
    x: Tensor,
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor: int | None,
) -> Tensor:
    """dL/dx = transposed pooling of dL/dy / count: each output spreads its gradient evenly over its window.

    Both poolings are the products with 0/1 window matrices A_H [H', H] and A_W [W', W]:
    dL/dx = A_H^T (dL/dy / count) A_W, with the count of each window known at export.
    """
    stride = stride or kernel
    kernel, stride, padding = (list(v) * (2 // len(v)) for v in (kernel, stride, padding))
    windows = [
        _windows(x.shape[i - 2], grad.shape[i - 2], kernel[i], stride[i], padding[i]) for i in range(2)
    ]
    counts = [_counts(windows[i], x.shape[i - 2], padding[i], count_include_pad) for i in range(2)]
    rows, columns = (_matrix(windows[i], x.shape[i - 2], grad) for i in range(2))
    if divisor:
        scaled = grad * (1.0 / divisor)
    elif len({*counts[0]}) == len({*counts[1]}) == 1:
        scaled = grad * (1.0 / (counts[0][0] * counts[1][0]))
    else:
        scaled = grad / torch.tensor([[a * b for b in counts[1]] for a in counts[0]], dtype=grad.dtype)
    return _sandwich(rows.t(), scaled, columns)


def adaptive_avg_pool2d(x: Tensor, output_size: list[int]) -> Tensor:
    """y = A_H x A_W^T, where row i of A averages inputs floor(i n / m) .. ceil((i + 1) n / m); a mean if m = 1."""
    if list(output_size) == [1, 1]:
        return x.mean([-2, -1], keepdim=True)
    rows, columns = (_adaptive_matrix(x.shape[i - 2], output_size[i], x) for i in range(2))
    return _sandwich(rows, x, columns.t())


def adaptive_avg_pool2d_backward(grad: Tensor, x: Tensor) -> Tensor:
    """dL/dx = A_H^T dL/dy A_W with the averaging matrices of the forward."""
    if tuple(grad.shape[-2:]) == (1, 1):
        return (grad * (1.0 / (x.shape[-2] * x.shape[-1]))).expand(x.shape)
    rows, columns = (_adaptive_matrix(x.shape[i - 2], grad.shape[i - 2], x) for i in range(2))
    return _sandwich(rows.t(), grad, columns)


def _sandwich(left: Tensor, x: Tensor, right: Tensor) -> Tensor:
    """left x right for each plane; the left product is taken on the transpose, so that no constant is repeated."""
    return ((x @ right).transpose(-1, -2) @ left.t()).transpose(-1, -2)


def _windows(size: int, count: int, kernel: int, stride: int, padding: int) -> list[tuple[int, int]]:
    """First and one-past-last position of each window, padding included (a ceil-mode window may stick out)."""
    starts = [i * stride - padding for i in range(count)]
    return [(start, min(start + kernel, size + padding)) for start in starts]


def _counts(windows: list[tuple[int, int]], size: int, padding: int, include_pad: bool) -> list[int]:
    if include_pad:
        return [stop - start for start, stop in windows]
    return [min(stop, size) - max(start, 0) for start, stop in windows]


def _matrix(windows: list[tuple[int, int]], size: int, like: Tensor) -> Tensor:
    """[windows, size] with 1 where a window covers a position."""
    return torch.tensor(
        [[float(start <= q < stop) for q in range(size)] for start, stop in windows], dtype=like.dtype
    )


def _adaptive_matrix(size: int, count: int, like: Tensor) -> Tensor:
    windows = [(i * size // count, -(-(i + 1) * size // count)) for i in range(count)]
    return _matrix(windows, size, like) / torch.tensor(
        [[float(stop - start)] for start, stop in windows], dtype=like.dtype
    )


RULES = {
    _aten.max_pool2d_with_indices_backward.default: max_pool2d_backward,
    _aten.avg_pool2d_backward.default: avg_pool2d_backward,
    _aten._adaptive_avg_pool2d.default: adaptive_avg_pool2d,
    _aten._adaptive_avg_pool2d_backward.default: adaptive_avg_pool2d_backward,
}
