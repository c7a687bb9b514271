"""Pooling as maxima and sums of slices, channels last, and gradients that are put back without positions.

A maximum's gradient goes to the first entry of the window that equals it, as in torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from edgefl_export.decompositions import pooling as plain
from edgefl_export.decompositions.convolution import ConvolutionArgs
from edgefl_export.decompositions.pooling import PoolingWindows
from edgefl_export.executorch.rules import convolution as flat
from edgefl_export.executorch.rules.arithmetic import step
from edgefl_export.executorch.rules.convolution import KernelArgs
from edgefl_export.executorch.rules.shifts import cut, interleave, place, taps, total, window
from edgefl_export.operators import DECLINED, Rules

_aten = torch.ops.aten
_LAST, _FIRST = (0, 2, 3, 1), (0, 3, 1, 2)

MOST_PLACES = 64
"""Of a window, each of which is some nodes: larger ones run on kernels."""


def max_pool2d(x: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    """Return (maximum of each window, its flat position in the plane); unread positions are removed from the graph.

    ``args`` are the op's arguments after the input: kernel, stride, padding, dilation and ceil mode.
    """
    where = PoolingWindows.of(2, *args)
    if not _covered(x, where):
        return plain.max_pool2d(x, *args)
    moves = _moves(where)
    image = x.permute(_LAST)
    parts = windows_of(image, where.kernel, moves)
    positions = torch.arange(x.shape[2] * x.shape[3]).view(1, x.shape[2], x.shape[3], 1)
    ranks = windows_of(positions.expand(image.shape).contiguous(), where.kernel, moves)
    best, places = first_maximum(_flat(parts), _flat(ranks))
    return best.permute(_FIRST), places.permute(_FIRST)


def max_pool2d_backward(grad: Tensor, x: Tensor, *args: Any) -> Tensor:
    """Compute dL/dx[q] = sum of dL/dy[p] over windows p whose first maximum is x[q]."""
    where = PoolingWindows.of(2, *args[:-1])
    if not _covered(x, where):
        return plain.max_pool2d_backward(grad, x, *args)
    moves = _moves(where)
    image, grad = x.permute(_LAST), grad.permute(_LAST)
    shares = rows_of(share_gradient(grad, _flat(windows_of(image, where.kernel, moves))), where.kernel[1])
    return place(shares, image.shape[1:3], moves.all_met(where.kernel)).permute(_FIRST)


def avg_pool2d(x: Tensor, *args: Any) -> Tensor:
    """Compute the mean of each window. ``args`` are the op's arguments after the input."""
    where = PoolingWindows.of_average(2, *args)
    if not _covered(x, where):
        return plain.avg_pool2d(x, *args)
    parts = windows_of(x.permute(_LAST), where.kernel, _moves(where))
    return (total(_flat(parts), ()) * _share(where)).permute(_FIRST)


def avg_pool2d_backward(grad: Tensor, x: Tensor, *args: Any) -> Tensor:
    """Compute dL/dx[q] = sum of dL/dy[p] / the size of a window, over windows p that contain q."""
    where = PoolingWindows.of_average(2, *args)
    if not _covered(x, where):
        return plain.avg_pool_backward(2, grad, x, *args)
    tall, wide = where.kernel
    share = grad.permute(_LAST) * _share(where)
    return place([[share] * wide] * tall, x.shape[2:], _moves(where).all_met(where.kernel)).permute(_FIRST)


def _share(where: PoolingWindows) -> float:
    return 1.0 / (where.divisor or math.prod(where.kernel))


def _covered(x: Tensor, where: PoolingWindows) -> bool:
    plain_sides = not any(where.padding) and not where.ceil_mode and math.prod(where.kernel) <= MOST_PLACES
    return x.dim() == 4 and plain_sides and x.dtype == torch.float32


def _moves(where: PoolingWindows) -> KernelArgs:
    return KernelArgs((where.stride[0], where.stride[1]), (0, 0), (where.dilation[0], where.dilation[1]))


def windows_of(image: Tensor, kernel: Sequence[int], moves: KernelArgs) -> list[list[Tensor]]:
    """Return for each kernel position [KH][KW] the entries of all windows at it, [N, H', W', C]."""
    height, width = moves.outputs(image, (kernel[0], kernel[1]))
    rows = taps(image, 1, kernel[0], height, moves.stride[0], 0, moves.dilation[0])
    return [taps(row, 2, kernel[1], width, moves.stride[1], 0, moves.dilation[1]) for row in rows]


def _flat(parts: list[list[Tensor]]) -> list[Tensor]:
    return [part for row in parts for part in row]


def rows_of(parts: Sequence[Tensor], wide: int) -> list[list[Tensor]]:
    """Split ``parts`` into rows of ``wide`` parts each."""
    return [list(parts[start : start + wide]) for start in range(0, len(parts), wide)]


def first_maximum(parts: Sequence[Tensor], ranks: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return (largest of all parts, entry by entry; rank (int64) of the first part that has it). ``ranks`` has one for
    each part.
    """
    best = _maximum(parts)
    where, left = torch.zeros((), dtype=torch.int64), torch.ones(())
    for value, rank in zip(parts, ranks, strict=True):
        rest = left * step(best - value)
        where = where + rank * (left - rest).to(torch.int64)
        left = rest
    return best, where


def share_gradient(grad: Tensor, parts: Sequence[Tensor]) -> list[Tensor]:
    """Return for each part ``grad`` where the part is the first one with the largest entry, and 0 elsewhere."""
    best, left, zero = _maximum(parts), grad, torch.zeros((), dtype=grad.dtype)
    shares = []
    for value in parts:
        lower = best > value
        shares.append(torch.where(lower, zero, left))
        left = torch.where(lower, left, zero)  # entries after the first maximum
    return shares


def _maximum(parts: Sequence[Tensor]) -> Tensor:
    first, *rest = parts
    for part in rest:
        first = torch.maximum(first, part)
    return first


# Convolutions and maxima over three axes for ExecuTorch, whose CPU backend knows two.
#
# The kernel's positions in depth lie side by side as channels. With x_k the input that position k reads, y[n, o, d] = sum_k
# w[o, :, k] * x_k[n, :, d]. That is one two-dimensional convolution of planes [N D', C K, H, W]. Its gradients are put back
# to the places that each position read.


def convolution(x: Tensor, w: Tensor, bias: Tensor | None, *args: Any) -> Tensor:
    """Compute y = x * w + bias for x [N, C, D, H, W] and w [O, C / groups, K, *], or [C, O / groups, K, *] if transposed."""
    if not _covers_volume(x, w):
        return flat.convolution(x, w, bias, *args)
    how = ConvolutionArgs.of(3, *args)
    depth, plane = _split(how)
    planes = planes_of(x) if how.transposed else spread(x, w.shape[2], _count(x, w, depth), depth)
    y = flat.convolution(planes, _side_by_side(w), None, *plane)
    if how.transposed:
        reach = depth.dilation[0] * (w.shape[2] - 1)
        size = (x.shape[2] - 1) * depth.stride[0] - 2 * depth.padding[0] + reach + how.output_padding[0] + 1
        y = put_back(y, w.shape[2], len(x), size, depth)
    else:
        y = volumes_of(y, len(x))
    return y if bias is None else y + bias.view(-1, 1, 1, 1)


def convolution_backward(
    grad: Tensor, x: Tensor, w: Tensor, bias_sizes: list[int] | None, *args: Any
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Compute (dL/dx, dL/dw, dL/db), with None for those that ``output_mask``, the last of ``args``, does not request.

    The other ``args`` are stride, padding, dilation, transposed, output padding and groups.
    """
    if not _covers_volume(x, w):
        return flat.convolution_backward(grad, x, w, bias_sizes, *args)
    *given, output_mask = args
    how = ConvolutionArgs.of(3, *given)
    transposed, (depth, plane) = how.transposed, _split(how)
    small, large = (x, grad) if transposed else (grad, x)
    met = spread(large, w.shape[2], small.shape[2], depth)
    first, second = (met, planes_of(small)) if transposed else (planes_of(small), met)
    wanted = [*output_mask[:2], False]
    dx, dw, _ = flat.convolution_backward(first, second, _side_by_side(w), None, *plane, wanted)
    if dx is not None and transposed:
        dx = volumes_of(dx, len(x))
    elif dx is not None:
        dx = put_back(dx, w.shape[2], len(x), x.shape[2], depth)
    db = grad.sum([0, 2, 3, 4]) if output_mask[2] else None
    return dx, None if dw is None else dw.reshape(w.shape), db


def _covers_volume(x: Tensor, w: Tensor) -> bool:
    return w.dim() == 5 and x.dim() == 5 and x.dtype == torch.float32


def _split(how: ConvolutionArgs) -> tuple[KernelArgs, tuple[Any, ...]]:
    """Return (stride, padding and dilation in depth, as the first axis of KernelArgs; arguments of the convolution
    over a plane).
    """
    stride, padding, dilation = how.stride, how.padding, how.dilation
    depth = KernelArgs((stride[0], 1), (padding[0], 0), (dilation[0], 1))
    plane = (stride[1:], padding[1:], dilation[1:], how.transposed, how.output_padding[1:], how.groups)
    return depth, plane


def _count(x: Tensor, w: Tensor, depth: KernelArgs) -> int:
    """Return the number of planes of a convolution's result; ``depth`` has stride, padding and dilation in depth."""
    reach = depth.dilation[0] * (w.shape[2] - 1)
    return int(x.shape[2] + 2 * depth.padding[0] - reach - 1) // depth.stride[0] + 1


def _side_by_side(w: Tensor) -> Tensor:
    """Move the depth positions of a kernel into its channels: [O, C, K, KH, KW] -> [O, C K, KH, KW]."""
    return w.reshape(w.shape[0], -1, *w.shape[3:])


def planes_of(x: Tensor) -> Tensor:
    """Merge depth into the batch: [N, C, D, H, W] -> [N D, C, H, W]."""
    return x.transpose(1, 2).reshape(-1, x.shape[1], *x.shape[3:])


def volumes_of(x: Tensor, rows: int) -> Tensor:
    """Split depth off the batch, the inverse of :func:`planes_of`; ``rows`` is the number of samples."""
    return x.view(rows, -1, *x.shape[1:]).transpose(1, 2).contiguous()


def spread(x: Tensor, kernel: int, count: int, depth: KernelArgs) -> Tensor:
    """Return the planes that each depth position of the kernel reads, as channels: [N, C, D, H, W] -> [N count, C
    kernel, H, W].
    """
    parts = taps(x, 2, kernel, count, depth.stride[0], depth.padding[0], depth.dilation[0])
    side = torch.stack([planes_of(part) for part in parts], 2)
    return side.view(side.shape[0], -1, *x.shape[3:])


def put_back(x: Tensor, kernel: int, rows: int, size: int, depth: KernelArgs) -> Tensor:
    """Apply the adjoint of :func:`spread`, which adds planes: [N D', C kernel, H, W] -> [N, C, size, H, W].

    ``rows`` is N, ``depth`` has stride, padding and dilation in depth.
    """
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


def _pad(x: Tensor, where: PoolingWindows, value: float) -> Tensor:
    """Pad x [N, C, D, H, W] with ``value`` as far as windows reach beyond it."""
    pairs = zip(reversed(where.padding), reversed(where.ends(x)), strict=True)
    around: Tensor = _aten.constant_pad_nd(x, [side for pair in pairs for side in pair], value)
    return around


def _volume_moves(where: PoolingWindows) -> tuple[KernelArgs, KernelArgs]:
    """Return (stride and dilation in depth, as the first axis of KernelArgs; stride and dilation over a plane).

    Both have padding 0, because the input is padded before.
    """
    (deep, *stride), (far, *dilation) = where.stride, where.dilation
    plane = KernelArgs((stride[0], stride[1]), (0, 0), (dilation[0], dilation[1]))
    return KernelArgs((deep, 1), (0, 0), (far, 1)), plane


def _windows(padded: Tensor, where: PoolingWindows) -> list[Tensor]:
    """Return for each position in a window (by depth, row, column) the entries of all windows at it, [N D', H', W', C]."""
    (deep, *kernel), (depth, plane) = where.kernel, _volume_moves(where)
    count = (padded.shape[2] - depth.dilation[0] * (deep - 1) - 1) // depth.stride[0] + 1
    slices = taps(padded, 2, deep, count, depth.stride[0], 0, depth.dilation[0])
    planes = [planes_of(part).permute(_LAST) for part in slices]
    return [part for each in planes for row in windows_of(each, kernel, plane) for part in row]


def max_pool3d(x: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    """Return (maximum of each window, its flat position in the volume); unread positions leave the graph.

    ``args`` are the op's arguments after the input. For x without a batch axis return NotImplemented (the op is kept).
    """
    if x.dim() != 5:
        return DECLINED
    where, volume = PoolingWindows.of(3, *args), x.shape[2:]
    places = torch.arange(volume.numel()).view(1, 1, *volume).expand(x.shape).contiguous()
    values = _windows(_pad(x, where, -math.inf), where)
    best, ranks = first_maximum(values, _windows(_pad(places, where, 0), where))
    return (
        volumes_of(best.permute(_FIRST).contiguous(), len(x)),
        volumes_of(ranks.permute(_FIRST).contiguous(), len(x)),
    )


def max_pool3d_backward(grad: Tensor, x: Tensor, *args: Any) -> Tensor:
    """Compute dL/dx[q] = sum of dL/dy[p] over windows p whose first maximum is x[q].

    For x without a batch axis return NotImplemented (the op is kept).
    """
    if x.dim() != 5:
        return DECLINED
    where = PoolingWindows.of(3, *args[:-1])
    padded = _pad(x, where, -math.inf)
    (deep, tall, wide), (depth, plane) = where.kernel, _volume_moves(where)
    met = plane.all_met((tall, wide))
    lines = planes_of(grad).permute(_LAST)
    shares = rows_of(share_gradient(lines, _windows(padded, where)), wide)
    size = padded.shape[3:]
    parts = [
        place(shares[start : start + tall], size, met).permute(_FIRST)
        for start in range(0, len(shares), tall)
    ]
    side = torch.stack(parts, 2)
    whole = put_back(side.view(len(side), -1, *size), deep, len(x), padded.shape[2], depth)
    for axis, (before, length) in enumerate(zip(where.padding, x.shape[2:], strict=True), 2):
        whole = cut(whole, axis, before, before + length)
    return whole.contiguous()


RULES: Rules = {
    _aten.avg_pool2d.default: avg_pool2d,
    _aten.avg_pool2d_backward.default: avg_pool2d_backward,
    _aten.max_pool2d_with_indices.default: max_pool2d,
    _aten.max_pool2d_with_indices_backward.default: max_pool2d_backward,
    _aten.convolution.default: convolution,
    _aten.convolution_backward.default: convolution_backward,
    _aten.max_pool3d_with_indices.default: max_pool3d,
    _aten.max_pool3d_with_indices_backward.default: max_pool3d_backward,
}
