"""Convolutions and maxima over three axes for ExecuTorch, whose CPU backend knows two.

Convolutions: the kernel's positions in depth lie side by side as channels: with x_k the input as position k meets it,
y[n, o, d] = sum_k w[o, :, k] * x_k[n, :, d] is one two-dimensional convolution of planes [N D', C K, H, W]. Its gradients
are those of that one, put back to where they were met.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from exporters.decompositions.convolution.moves import per_axis
from exporters.decompositions.pooling import end_padding, moves_of
from exporters.decompositions.rule import DECLINED, Rules
from exporters.executorch.rules import convolution as flat
from exporters.executorch.rules.dense import Moves
from exporters.executorch.rules.pooling import first_maximum, rows_of, shared, windows_of
from exporters.executorch.rules.shifts import cut, interleave, place, taps, total, window

_aten = torch.ops.aten
_LAST, _FIRST = (0, 2, 3, 1), (0, 3, 1, 2)


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


@dataclass(frozen=True)
class _Pool:
    """How windows over three axes lie in x [N, C, D, H, W], which gets the least numbers around it where they stick out."""

    kernel: list[int]
    stride: list[int]
    padding: list[int]
    dilation: list[int]
    ends: list[int]

    @classmethod
    def of(
        cls,
        x: Tensor,
        kernel: Sequence[int],
        stride: Sequence[int] | None,
        padding: Sequence[int] | None,
        dilation: Sequence[int] | None,
        *,
        ceil_mode: bool,
    ) -> _Pool:
        kernel, stride, padding, dilation = moves_of(3, kernel, stride, padding, dilation)
        axes = zip(x.shape[2:], kernel, stride, padding, dilation, strict=True)
        return cls(kernel, stride, padding, dilation, [end_padding(*axis, ceil_mode) for axis in axes])

    def padded(self, x: Tensor, value: float) -> Tensor:
        sides = [
            side for pair in zip(reversed(self.padding), reversed(self.ends), strict=True) for side in pair
        ]
        around: Tensor = _aten.constant_pad_nd(x, sides, value)
        return around

    @property
    def plane(self) -> Moves:
        return Moves((self.stride[1], self.stride[2]), (0, 0), (self.dilation[1], self.dilation[2]))

    @property
    def depth(self) -> Moves:
        return Moves((self.stride[0], 1), (0, 0), (self.dilation[0], 1))

    def windows(self, padded: Tensor) -> list[Tensor]:
        """The entries of all windows at one place of them, [N D', H', W', C], by depth, row and column."""
        reach = self.dilation[0] * (self.kernel[0] - 1)
        count = (padded.shape[2] - reach - 1) // self.stride[0] + 1
        slices = taps(padded, 2, self.kernel[0], count, self.stride[0], 0, self.dilation[0])
        planes = [planes_of(part).permute(_LAST) for part in slices]
        return [
            part for each in planes for row in windows_of(each, self.kernel[1:], self.plane) for part in row
        ]


def max_pool3d(
    x: Tensor,
    kernel: list[int],
    stride: list[int] | None = None,
    padding: list[int] | None = None,
    dilation: list[int] | None = None,
    ceil_mode: bool = False,
) -> tuple[Tensor, Tensor]:
    """y = max over each window, with its place in the volume, which nothing is left of unless somebody reads it."""
    if x.dim() != 5:
        return DECLINED
    pool = _Pool.of(x, kernel, stride, padding, dilation, ceil_mode=ceil_mode)
    volume = x.shape[2:]
    places = torch.arange(volume.numel()).view(1, 1, *volume).expand(x.shape).contiguous()
    best, where = first_maximum(pool.windows(pool.padded(x, -math.inf)), pool.windows(pool.padded(places, 0)))
    return (
        volumes_of(best.permute(_FIRST).contiguous(), len(x)),
        volumes_of(where.permute(_FIRST).contiguous(), len(x)),
    )


def max_pool3d_backward(
    grad: Tensor,
    x: Tensor,
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    ceil_mode: bool,
    indices: Tensor,
) -> Tensor:
    """dL/dx[q] = sum of dL/dy[p] over windows p whose first maximum is x[q]."""
    if x.dim() != 5:
        return DECLINED
    pool = _Pool.of(x, kernel, stride, padding, dilation, ceil_mode=ceil_mode)
    padded = pool.padded(x, -math.inf)
    shares = rows_of(shared(planes_of(grad).permute(_LAST), pool.windows(padded)), pool.kernel[2])
    size, tall = padded.shape[3:], pool.kernel[1]
    parts = [
        place(shares[start : start + tall], size, pool.plane.all_met(pool.kernel[1:])).permute(_FIRST)
        for start in range(0, len(shares), tall)
    ]
    side = torch.stack(parts, 2)
    whole = put_back(side.view(len(side), -1, *size), pool.kernel[0], len(x), padded.shape[2], pool.depth)
    for axis, (before, length) in enumerate(zip(pool.padding, x.shape[2:], strict=True), 2):
        whole = cut(whole, axis, before, before + length)
    return whole.contiguous()


RULES: Rules = {
    _aten.convolution.default: convolution,
    _aten.convolution_backward.default: convolution_backward,
    _aten.max_pool3d_with_indices.default: max_pool3d,
    _aten.max_pool3d_with_indices_backward.default: max_pool3d_backward,
}
