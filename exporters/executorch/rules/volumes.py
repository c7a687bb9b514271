"""Convolutions over three axes for ExecuTorch, whose CPU backend knows two.

The kernel's positions in depth lie side by side as channels: with x_k the input as position k meets it,
y[n, o, d] = sum_k w[o, :, k] * x_k[n, :, d] is one two-dimensional convolution of planes [N D', C K, H, W]. Its gradients
are those of that one, put back to where they were met.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from exporters.decompositions.convolution import per_axis
from exporters.decompositions.rule import Rules
from exporters.executorch.rules import convolution as flat
from exporters.executorch.rules.dense import Moves
from exporters.executorch.rules.shifts import interleave, taps, total, window

_aten = torch.ops.aten


def convolution(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    output_padding: list[int],
    groups: int,
) -> Tensor:
    """y = x * w + bias with x [N, C, D, H, W] and w [O, C / groups, K, *], or [C, O / groups, K, *] transposed."""
    if not _covered(x, w):
        return flat.convolution(x, w, bias, stride, padding, dilation, transposed, output_padding, groups)
    depth, plane = _split(stride, padding, dilation)
    extra = per_axis(output_padding, 3)
    planes = planes_of(x) if transposed else spread(x, w.shape[2], _count(x, w, depth), depth)
    y = flat.convolution(planes, _side_by_side(w), None, *plane, transposed, extra[1:], groups)
    if transposed:
        reach = depth.dilation[0] * (w.shape[2] - 1)
        size = (x.shape[2] - 1) * depth.stride[0] - 2 * depth.padding[0] + reach + extra[0] + 1
        y = put_back(y, w.shape[2], len(x), size, depth)
    else:
        y = volumes_of(y, len(x))
    return y if bias is None else y + bias.view(-1, 1, 1, 1)


def convolution_backward(
    grad: Tensor,
    x: Tensor,
    w: Tensor,
    bias_sizes: list[int] | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    output_padding: list[int],
    groups: int,
    output_mask: list[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(dL/dx, dL/dw, dL/db), each only where ``output_mask`` asks."""
    if not _covered(x, w):
        return flat.convolution_backward(
            grad, x, w, bias_sizes, stride, padding, dilation, transposed, output_padding, groups, output_mask
        )
    depth, plane = _split(stride, padding, dilation)
    small, large = (x, grad) if transposed else (grad, x)
    met = spread(large, w.shape[2], small.shape[2], depth)
    first, second = (met, planes_of(small)) if transposed else (planes_of(small), met)
    extra = per_axis(output_padding, 3)[1:]
    wanted = [*output_mask[:2], False]
    dx, dw, _ = flat.convolution_backward(
        first, second, _side_by_side(w), None, *plane, transposed, extra, groups, wanted
    )
    if dx is not None and transposed:
        dx = volumes_of(dx, len(x))
    elif dx is not None:
        dx = put_back(dx, w.shape[2], len(x), x.shape[2], depth)
    db = grad.sum([0, 2, 3, 4]) if output_mask[2] else None
    return dx, None if dw is None else dw.reshape(w.shape), db


def _covered(x: Tensor, w: Tensor) -> bool:
    return w.dim() == 5 and x.dim() == 5 and x.dtype == torch.float32


def _split(
    stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> tuple[Moves, tuple[list[int], list[int], list[int]]]:
    """How the kernel moves in depth (the first axis of Moves), and over a plane."""
    moves = [per_axis(each, 3) for each in (stride, padding, dilation)]
    first, *others = ((each[0], still) for each, still in zip(moves, (1, 0, 1), strict=True))
    return Moves(first, *others), (moves[0][1:], moves[1][1:], moves[2][1:])


def _count(x: Tensor, w: Tensor, depth: Moves) -> int:
    """Planes of the result."""
    reach = depth.dilation[0] * (w.shape[2] - 1)
    return int(x.shape[2] + 2 * depth.padding[0] - reach - 1) // depth.stride[0] + 1


def _side_by_side(w: Tensor) -> Tensor:
    """[O, C, K, KH, KW] -> [O, C K, KH, KW]."""
    return w.reshape(w.shape[0], -1, *w.shape[3:])


def planes_of(x: Tensor) -> Tensor:
    """[N, C, D, H, W] -> [N D, C, H, W]."""
    return x.transpose(1, 2).reshape(-1, x.shape[1], *x.shape[3:])


def volumes_of(x: Tensor, rows: int) -> Tensor:
    """The inverse of :func:`planes_of`."""
    return x.view(rows, -1, *x.shape[1:]).transpose(1, 2).contiguous()


def spread(x: Tensor, kernel: int, count: int, depth: Moves) -> Tensor:
    """What each kernel position in depth meets: [N, C, D, H, W] -> [N count, C kernel, H, W]."""
    parts = taps(x, 2, kernel, count, depth.stride[0], depth.padding[0], depth.dilation[0])
    side = torch.stack([planes_of(part) for part in parts], 2)
    return side.view(side.shape[0], -1, *x.shape[3:])


def put_back(x: Tensor, kernel: int, rows: int, size: int, depth: Moves) -> Tensor:
    """The adjoint of :func:`spread`: [N D', C kernel, H, W] -> [N, C, size, H, W]."""
    side = x.view(len(x), -1, kernel, *x.shape[2:])
    parts = [volumes_of(side[:, :, place], rows) for place in range(kernel)]
    stride = depth.stride[0]
    lines: list[Tensor | None] = []
    for phase in range(stride):
        met = depth.met(kernel, phase, 0)
        moved = [window(parts[place], 2, start, -(-size // stride)) for place, start in met]
        lines.append(total(moved, ()) if any(part is not None for part in moved) else None)
    whole = interleave(lines, 2, size)
    shape = (rows, side.shape[1], size, *x.shape[2:])
    return torch.zeros(shape) if whole is None else whole


RULES: Rules = {
    _aten.convolution.default: convolution,
    _aten.convolution_backward.default: convolution_backward,
}
