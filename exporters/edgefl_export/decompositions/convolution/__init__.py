"""Gradients of a convolution, any stride, padding, dilation and groups, in one to three dimensions.

With y[n, o, p] = sum_{c, k} w[o, c, k] x[n, c, p * stride + k * dilation - padding] for each group:

* input gradient: the transposed convolution of dL/dy with w, which for stride 1 and a small kernel is a plain
  convolution with the flipped kernel (runtimes run that one better, on several threads above all);
* weight gradient: one of three forms (:mod:`edgefl_export.decompositions.convolution.weights`).

All three of 3 x 3 with many channels: in fewer multiplications (:mod:`edgefl_export.decompositions.convolution.winograd`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from edgefl_export.decompositions.convolution import depthwise, winograd
from edgefl_export.decompositions.convolution.moves import ConvolutionArgs
from edgefl_export.decompositions.convolution.weights import weight_gradient
from edgefl_export.decompositions.rule import DECLINED, Rules

_aten = torch.ops.aten

# Input gradients: up to this many kernel offsets by a flipped kernel, above by a transposed convolution if there
# are this many positions.
FLIPPED_OFFSETS = 9
TRANSPOSED_POSITIONS = 64


def convolution(x: Tensor, w: Tensor, bias: Tensor | None, *args: Any) -> Tensor:
    """The op stays, but for depthwise ones on small planes (:mod:`edgefl_export.decompositions.convolution.depthwise`)
    and those of many channels (:mod:`edgefl_export.decompositions.convolution.winograd`)."""
    rank = w.dim() - 2
    moves = ConvolutionArgs.of(rank, *args)
    if moves.transposed or x.dim() != w.dim():
        return DECLINED
    if (tiled := _tiled(x, w, moves)) is not None:
        y = winograd.forward(x, w, tiled)
        return y if bias is None else y + bias.view(-1, 1, 1)
    outputs = [
        (x.shape[2 + i] + 2 * moves.padding[i] - moves.dilation[i] * (w.shape[2 + i] - 1) - 1)
        // moves.stride[i]
        + 1
        for i in range(rank)
    ]
    if not depthwise.fits(x, w, outputs, moves.groups):
        return DECLINED
    planes = _planes(x.shape, outputs, w.shape, moves)
    y = depthwise.forward(x, w, planes)
    return y if bias is None else y + bias.view(-1, *[1] * rank)


def _planes(
    x: Sequence[int], outputs: Sequence[int], w: Sequence[int], moves: ConvolutionArgs
) -> depthwise.Planes:
    sizes = (x[2:], outputs, w[2:], moves.stride, moves.padding, moves.dilation)
    return depthwise.Planes(*(tuple(size) for size in sizes))


def convolution_backward(
    grad: Tensor, x: Tensor, w: Tensor, bias_sizes: list[int] | None, *args: Any
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(dL/dx, dL/dw, dL/db), each only where ``output_mask`` asks. Shapes: x [N, C, *S], w [O, C / groups, *K]."""
    *how, output_mask = args
    moves = ConvolutionArgs.of(w.dim() - 2, *how)
    transposed = moves.transposed
    grad_x = grad_w = grad_b = None
    if not transposed and depthwise.fits(x, w, grad.shape[2:], moves.groups):
        planes = _planes(x.shape, grad.shape[2:], w.shape, moves)
        return (
            depthwise.input_gradient(grad, w, planes) if output_mask[0] else None,
            depthwise.weight_gradient(grad, x, planes) if output_mask[1] else None,
            _bias_gradient(grad) if output_mask[2] else None,
        )
    tiled = None if transposed else _tiled(x, w, moves)
    # The weight gradient first: its copies of x and dL/dy are gone before dL/dx takes memory.
    if tiled is not None:
        grad_w = winograd.weight_gradient(grad, x, tiled) if output_mask[1] else None
        grad_x = winograd.input_gradient(grad, w, tiled) if output_mask[0] else None
        return grad_x, grad_w, _bias_gradient(grad) if output_mask[2] else None
    if output_mask[1]:
        # A transposed convolution is the convolution's adjoint: input and output change places.
        small, large = (x, grad) if transposed else (grad, x)
        grad_w = weight_gradient(small, large, w.shape, moves)
    if output_mask[0]:
        backward = _input_gradient_of_transposed if transposed else _input_gradient
        grad_x = backward(grad, x, w, moves)
    if output_mask[2]:
        grad_b = _bias_gradient(grad)
    return grad_x, grad_w, grad_b


def _tiled(x: Tensor, w: Tensor, moves: ConvolutionArgs) -> winograd.WinogradPlan | None:
    """Return the tiles for a convolution and its gradients; None if tiles do not pay."""
    plain = {*moves.stride, *moves.dilation, moves.groups} == {1}
    return winograd.plan(x.shape, w.shape, moves.padding, x.dtype) if plain else None


def _bias_gradient(grad: Tensor) -> Tensor:
    return grad.sum([axis for axis in range(grad.dim()) if axis != 1])


def _input_gradient_of_transposed(grad: Tensor, x: Tensor, w: Tensor, moves: ConvolutionArgs) -> Tensor:
    """Adjoint of the transposed convolution: the convolution with the same kernel."""
    zeros = [0] * len(moves.stride)
    gradient: Tensor = _aten.convolution(
        grad, w, None, moves.stride, moves.padding, moves.dilation, False, zeros, moves.groups
    )
    for axis, size in enumerate(x.shape[2:], 2):  # with an output padding it may reach further than the input
        gradient = gradient.narrow(axis, 0, size) if gradient.shape[axis] > size else gradient
    return gradient


def _input_gradient(grad: Tensor, x: Tensor, w: Tensor, moves: ConvolutionArgs) -> Tensor:
    """dL/dx[n, c, q] = sum_{o, k} w[o, c, k] dL/dy[n, o, (q + padding - k * dilation) / stride] where divisible."""
    stride, padding, dilation, groups = moves.stride, moves.padding, moves.dilation, moves.groups
    reach = [d * (k - 1) for d, k in zip(dilation, w.shape[2:], strict=True)]
    zeros = [0] * len(stride)
    plain = all(s == 1 for s in stride) and all(r >= p for r, p in zip(reach, padding, strict=True))
    # Large kernels over many positions: one product and a sum of windows is faster than unfolding dL/dy.
    large = math.prod(w.shape[2:]) > FLIPPED_OFFSETS and math.prod(grad.shape[2:]) >= TRANSPOSED_POSITIONS
    if plain and not large:
        rest = [r - p for r, p in zip(reach, padding, strict=True)]
        space = [axis for axis in range(2, w.dim()) if w.shape[axis] > 1]
        # A flip goes entry by entry: of a large kernel's images, before and after, rather than of the kernel.
        images = bool(space) and grad.numel() + x.numel() < w.numel()
        kernel = _swap(w if images or not space else w.flip(space), groups)
        seen = grad.flip(space) if images else grad
        gradient: Tensor = _aten.convolution(seen, kernel, None, stride, rest, dilation, False, zeros, groups)
        return gradient.flip(space) if images else gradient
    extra = [
        x.shape[2 + i] - ((grad.shape[2 + i] - 1) * stride[i] - 2 * padding[i] + reach[i] + 1)
        for i in range(len(stride))
    ]
    transposed: Tensor = _aten.convolution(grad, w, None, stride, padding, dilation, True, extra, groups)
    return transposed


def _swap(w: Tensor, groups: int) -> Tensor:
    """[O, C/g, *K] -> [C, O/g, *K]."""
    out, per_group, *kernel = w.shape
    if groups == 1:
        return w.transpose(0, 1)
    split = w.view(groups, out // groups, per_group, *kernel).transpose(1, 2)
    return split.reshape(groups * per_group, out // groups, *kernel)


RULES: Rules = {
    _aten.convolution.default: convolution,
    _aten.convolution_backward.default: convolution_backward,
}
