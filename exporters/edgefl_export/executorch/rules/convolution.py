"""Convolutions and their gradients for ExecuTorch, whose own kernels are reference code.

Two-dimensional ones are products or, one channel per group, element-wise sums, channels last; one-dimensional ones are
two-dimensional with one row. Transposed ones are input gradients. What is left goes the way it goes for ONNX.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from edgefl_export.decompositions import convolution as plain
from edgefl_export.decompositions.convolution.moves import ConvolutionArgs
from edgefl_export.executorch.rules import dense, depthwise, few_channels
from edgefl_export.executorch.rules.dense import Moves
from edgefl_export.executorch.rules.shifts import join

_LAST, _FIRST = (0, 2, 3, 1), (0, 3, 1, 2)


def convolution(x: Tensor, w: Tensor, bias: Tensor | None, *args: Any) -> Tensor:
    """y = x * w + bias with x [N, C, *S] and w [O, C / groups, *K], or [C, O / groups, *K] transposed."""
    rank = w.dim() - 2
    if not _covered(x, w, rank):
        return plain.convolution(x, w, bias, *args)
    how = ConvolutionArgs.of(rank, *args)
    moves, groups, kernel = _moves(rank, how), how.groups, _flat(w, rank)
    if not how.transposed:
        y = _forward(_flat(x, rank), kernel, moves, groups)
    else:
        extra = [0] * (2 - rank) + how.output_padding
        size = [
            (n - 1) * moves.stride[a]
            - 2 * moves.padding[a]
            + moves.dilation[a] * (kernel.shape[2 + a] - 1)
            + 1
            for a, n in enumerate(_flat(x, rank).shape[2:])
        ]
        size = [n + more for n, more in zip(size, extra, strict=True)]
        y = _input_gradient(_flat(x, rank), kernel, size, moves, groups)
    y = y if bias is None else y + bias
    return _unflat(y.permute(_FIRST), rank)


def convolution_backward(
    grad: Tensor, x: Tensor, w: Tensor, bias_sizes: list[int] | None, *args: Any
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(dL/dx, dL/dw, dL/db), each only where ``output_mask`` asks."""
    rank = w.dim() - 2
    if not _covered(x, w, rank):
        return plain.convolution_backward(grad, x, w, bias_sizes, *args)
    *given, output_mask = args
    how = ConvolutionArgs.of(rank, *given)
    moves, transposed, groups = _moves(rank, how), how.transposed, how.groups
    g, image, kernel = (_flat(value, rank) for value in (grad, x, w))
    dx = dw = db = None
    if output_mask[0] and output_mask[1] and not transposed and _is_dense(kernel, groups):
        dx, dw = _gradients(g, image, kernel, moves, groups)
        dx, dw = _unflat(dx.permute(_FIRST), rank), dw.reshape(w.shape)
        output_mask = [False, False, output_mask[2]]
    if output_mask[1]:
        small, large = (image, g) if transposed else (g, image)
        dw = _weight_gradient(small, large, kernel.shape, moves, groups).reshape(w.shape)
    if output_mask[0]:
        if transposed:
            # With an output padding the gradient may reach further than the input.
            dx = _forward(g, kernel, moves, groups)[:, : image.shape[2], : image.shape[3]]
        else:
            dx = _input_gradient(g, kernel, list(image.shape[2:]), moves, groups)
        dx = _unflat(dx.permute(_FIRST), rank)
    if output_mask[2]:
        db = g.permute(_LAST).sum([0, 1, 2])
    return dx, dw, db


def _covered(x: Tensor, w: Tensor, rank: int) -> bool:
    return rank in (1, 2) and x.dim() == w.dim() and x.dtype == torch.float32


def _moves(rank: int, how: ConvolutionArgs) -> Moves:
    """A row axis in front, where there is none, on which nothing moves."""
    rows = (1, 0, 1) if rank == 1 else (how.stride[0], how.padding[0], how.dilation[0])
    pairs = zip(rows, (how.stride[-1], how.padding[-1], how.dilation[-1]), strict=True)
    return Moves(*pairs)


def _flat(x: Tensor, rank: int) -> Tensor:
    return x if rank == 2 else x.unsqueeze(2)


def _unflat(x: Tensor, rank: int) -> Tensor:
    return x if rank == 2 else x.squeeze(2)


def _one_to_one(w: Tensor, groups: int) -> bool:
    return w.shape[1] == 1 and w.shape[0] == groups and groups > 1


def _is_dense(w: Tensor, groups: int) -> bool:
    return not (_one_to_one(w, groups) or (groups == 1 and few_channels.fits(w)))


def _gradients(grad: Tensor, x: Tensor, w: Tensor, moves: Moves, groups: int) -> tuple[Tensor, Tensor]:
    """dL/dy [N, O, H', W'], x [N, C, H, W] -> dL/dx [N, H, W, C], dL/dw."""
    grads, images = grad.permute(_LAST).chunk(groups, 3), x.permute(_LAST).chunk(groups, 3)
    parts = [dense.gradients(*each, moves) for each in zip(grads, images, w.chunk(groups, 0), strict=True)]
    return join([dx for dx, _ in parts], 3), join([dw for _, dw in parts], 0)


def _forward(x: Tensor, w: Tensor, moves: Moves, groups: int) -> Tensor:
    """x [N, C, H, W] -> y [N, H', W', O]."""
    if groups == 1 and few_channels.fits(w):
        return few_channels.forward(x, w, moves)
    x = x.permute(_LAST)
    if _one_to_one(w, groups):
        return depthwise.forward(x, w, moves)
    kernels, images = w.chunk(groups, 0), x.chunk(groups, 3)
    return join([dense.forward(*pair, moves) for pair in zip(images, kernels, strict=True)], 3)


def _input_gradient(grad: Tensor, w: Tensor, size: list[int], moves: Moves, groups: int) -> Tensor:
    """dL/dy [N, O, H', W'] -> dL/dx [N, *size, C]."""
    grad = grad.permute(_LAST)
    if _one_to_one(w, groups):
        return depthwise.input_gradient(grad, w, size, moves)
    kernels, grads = w.chunk(groups, 0), grad.chunk(groups, 3)
    return join([dense.input_gradient(*pair, size, moves) for pair in zip(grads, kernels, strict=True)], 3)


def _weight_gradient(grad: Tensor, x: Tensor, shape: torch.Size, moves: Moves, groups: int) -> Tensor:
    """dL/dy [N, O, H', W'], x [N, C, H, W] -> dL/dw of ``shape``."""
    kernel = shape[2:]
    if groups == 1 and few_channels.covers(shape):
        return few_channels.weight_gradient(grad, x, kernel, moves)
    grad, x = grad.permute(_LAST), x.permute(_LAST)
    if shape[1] == 1 and shape[0] == groups > 1:
        return depthwise.weight_gradient(grad, x, kernel, moves)
    pairs = zip(grad.chunk(groups, 3), x.chunk(groups, 3), strict=True)
    return join([dense.weight_gradient(*pair, kernel, moves) for pair in pairs], 0)
