"""Gradients of a convolution, any stride, padding, dilation and groups, in one to three dimensions.

With y[n, o, p] = sum_{c, k} w[o, c, k] x[n, c, p * stride + k * dilation - padding] for each group:

* input gradient: the transposed convolution of dL/dy with w. For stride 1 and a small kernel it is a plain convolution
  with the flipped kernel, which runtimes run better, on several threads above all.
* weight gradient: one of the forms of :func:`weight_gradient`.

All three of 3 x 3 with many channels: in fewer multiplications (:mod:`edgefl_export.decompositions.winograd`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from edgefl_export.decompositions import depthwise, winograd
from edgefl_export.operators import DECLINED, Rules


@dataclass(frozen=True)
class ConvolutionArgs:
    """Arguments of a convolution by spatial axis: stride, padding, dilation and output padding; and the number of groups."""

    stride: list[int]
    padding: list[int]
    dilation: list[int]
    transposed: bool
    output_padding: list[int]
    groups: int

    @classmethod
    def of(cls, rank: int, *args: Any) -> ConvolutionArgs:
        """Return the arguments for ``rank`` spatial axes.

        ``args`` follow the bias in the op: stride, padding, dilation, transposed, output padding, groups.
        """
        *moves, transposed, output_padding, groups = args
        stride, padding, dilation = (per_axis(values, rank) for values in moves)
        return cls(stride, padding, dilation, transposed, per_axis(output_padding, rank), groups)


def per_axis(values: Sequence[int], rank: int) -> list[int]:
    """Return one value for each of ``rank`` axes; a list of a single value applies to all axes."""
    return list(values) * rank if len(values) == 1 else list(values)


# Weight gradients of a convolution.
#
# As a convolution of the input with dL/dy as its kernel, channels as a further axis of space; for the small windows of a
# first layer as one product with all of them; for large weights on few positions as one product per kernel offset, of dL/dy
# with the input seen through that offset.

_aten = torch.ops.aten

# A convolution's kernel may have as many axes in runtimes, that of channels included.
MOST_AXES = 3
# Weights of so many entries per output position get one product over all samples, not one per sample: where it is one for
# each kernel offset; and where one convolution makes them all.
MANY_ENTRIES, ENTRIES_PER_POSITION = 64, 16
# Below so many positions, weights of many entries for each are faster as one product per kernel offset.
FEW_POSITIONS = 128
# Windows of so few numbers, and of no more than twice as many as there are outputs, are laid out whole.
SMALL_WINDOW = 32
# Windows are gathered row by row where rows have so many numbers; shorter ones cost more than the longer copies of a cut.
GATHERED_CHANNELS = 32


def weight_gradient(grad: Tensor, x: Tensor, shape: Sequence[int], moves: ConvolutionArgs) -> Tensor:
    """Compute dL/dw[o, c, k] = sum_{n, p} dL/dy[n, o, p] x[n, c, p * stride + k * dilation - padding].

    Args:
        grad: dL/dy, [N, O, *P].
        x: input, [N, C, *S].
        shape: shape of w, [O, C / groups, *K].
        moves: arguments of the convolution.
    """
    groups = moves.groups
    if groups > 1 and shape[1] == 1 and shape[0] == groups:
        return _by_offset_depthwise(grad, x, shape, moves)
    positions = math.prod(grad.shape[2:])
    window = math.prod(shape[1:])
    if groups == 1 and {*moves.stride} == {1} and 1 < window <= min(SMALL_WINDOW, 2 * shape[0]):
        return _by_windows(grad, x, shape, moves)
    large = shape[0] * shape[1] >= MANY_ENTRIES * positions and positions < FEW_POSITIONS
    if len(shape) - 1 > MOST_AXES or math.prod(shape[2:]) == 1 or (large and groups == 1):
        return _by_offset(grad, x, shape, moves)
    return _by_volume(grad, x, shape, moves)


def _by_windows(grad: Tensor, x: Tensor, shape: Sequence[int], moves: ConvolutionArgs) -> Tensor:
    """Compute :func:`weight_gradient` as one product for each sample, [O, P] x [P, K C], of dL/dy and the windows of
    the input.

    It is for a first layer's few channels, where another convolution would work on one sample's channel at a time.
    """
    padded = _pad(x, moves.padding, first_axis=2)
    offsets = itertools.product(*(range(size) for size in shape[2:]))
    windows = [_window(padded, offset, grad.shape[2:], moves, first_axis=2) for offset in offsets]
    columns = torch.cat(windows, 1).flatten(2).transpose(1, 2)
    dw = torch.bmm(grad.flatten(2), columns).sum(0)
    return dw.view(shape[0], len(windows), shape[1]).transpose(1, 2).reshape(*shape)


def _by_volume(grad: Tensor, x: Tensor, shape: Sequence[int], moves: ConvolutionArgs) -> Tensor:
    """Compute :func:`weight_gradient` as one convolution over the spatial axes and channels, with dL/dy as its kernel
    of one channel:

    dL/dw[o, k, c] = sum_p dL/dy[o, p, 0] x[p * stride + k * dilation - padding, c]

    Stride and dilation change roles. The samples are groups, whose results are summed, or for a large weight the
    channels that the convolution sums over. With groups, the last spatial axis and the channels are merged if the
    offsets are adjacent: runtimes lay out windows row by row, and the rows are longer then.
    """
    stride, padding, dilation, groups = moves.stride, moves.padding, moves.dilation, moves.groups
    batch, out = grad.shape[:2]
    rank, kernel, depth = len(shape) - 2, shape[2:], shape[1]
    single = groups == 1 and out * depth >= ENTRIES_PER_POSITION * math.prod(grad.shape[2:])
    ends = [
        (grad.shape[2 + i] - 1) * stride[i] + (kernel[i] - 1) * dilation[i] + 1 - x.shape[2 + i] - padding[i]
        for i in range(rank)
    ]
    images = x.reshape(batch * groups, depth, *x.shape[2:])
    volumes, begins = _fit_volumes(images.permute(0, *range(2, 2 + rank), 1), padding, ends)
    if not single and dilation[-1] == 1:
        volumes, kernels = volumes.flatten(-2), grad.reshape(-1, 1, *grad.shape[2:])
        begins, stride = ([*move[:-1], move[-1] * depth] for move in (begins, stride))
    else:
        kernels = grad.transpose(0, 1).unsqueeze(-1) if single else grad.reshape(-1, 1, *grad.shape[2:], 1)
        begins, stride, dilation = [*begins, 0], [*stride, 1], [*dilation, 1]
    products: Tensor = _aten.convolution(
        volumes.unsqueeze(0),
        kernels,
        None,
        dilation,
        begins,
        stride,
        False,
        [0] * len(stride),
        1 if single else batch * groups,
    )
    dw = products.view(-1, out, math.prod(kernel), depth)
    summed = dw.squeeze(0) if single else dw.sum(0)
    return summed.transpose(1, 2).reshape(*shape) if depth > 1 else summed.view(*shape)


def _fit_volumes(volumes: Tensor, begins: list[int], ends: list[int]) -> tuple[Tensor, list[int]]:
    """Pad or cut the volumes [N, *S, C] so that the remaining padding is equal at both ends of each axis.

    ``begins`` and ``ends`` are the padding before and behind each axis; negative ends cut. Return (volumes, remaining
    padding by axis).
    """
    if begins == ends:
        return volumes, begins
    for axis, (size, end) in enumerate(zip(volumes.shape[1:-1], ends, strict=True), start=1):
        if end < 0:  # a stride that does not divide the input leaves its last rows unread
            volumes = volumes.narrow(axis, 0, size + end)
    if all(end <= 0 and begin == 0 for begin, end in zip(begins, ends, strict=True)):
        return volumes, begins
    pads = [0, 0]
    for begin, end in zip(reversed(begins), reversed(ends), strict=True):
        pads += [begin, max(end, 0)]
    padded: Tensor = _aten.constant_pad_nd(volumes, pads, 0.0)
    return padded, [0] * len(begins)


def _by_offset(grad: Tensor, x: Tensor, shape: Sequence[int], moves: ConvolutionArgs) -> Tensor:
    """Compute :func:`weight_gradient` as one product per kernel offset, with the input laid out channels last.

    The product is [N, g, O/g, P] x [N, g, P, C/g] summed over samples, or [O, N P] x [N P, C]. A window of the input is
    then a few long copies. Summing many small weight gradients over samples takes longer than laying out dL/dy for one
    large product. In that case the rows of windows are gathered, because runtimes cut windows on one thread and gather
    on all.
    """
    batch, out = grad.shape[:2]
    rank, kernel, groups = len(shape) - 2, shape[2:], moves.groups
    positions = math.prod(grad.shape[2:])
    single = groups == 1 and out * shape[1] >= MANY_ENTRIES * positions
    rows = grad.reshape(batch * groups, out // groups, -1)
    if single:
        rows = rows.transpose(0, 1).reshape(out, -1)
    last = _pad(x.permute(0, *range(2, 2 + rank), 1), moves.padding, first_axis=1)
    gathered = single and math.prod(kernel) > 1 and x.shape[1] >= GATHERED_CHANNELS
    places = _places(last.shape[:-1], grad.shape[2:], moves) if gathered else None
    pixels = last.reshape(-1, x.shape[1]) if gathered else last
    products = []
    for offset in itertools.product(*(range(size) for size in kernel)):
        if places is not None:
            shift = _row(last.shape[1:-1], [k * d for k, d in zip(offset, moves.dilation, strict=True)])
            products.append(rows @ pixels.index_select(0, places + shift))
            continue
        window = _window(last, offset, grad.shape[2:], moves, first_axis=1)
        if single:
            products.append(rows @ window.reshape(-1, x.shape[1]))
            continue
        columns = window.reshape(batch, -1, x.shape[1])
        if groups > 1:
            columns = columns.view(batch, -1, groups, shape[1]).permute(0, 2, 1, 3)
            columns = columns.reshape(batch * groups, -1, shape[1])
        product = torch.bmm(rows, columns).view(batch, out, shape[1])
        products.append(product.sum(0))
    if len(products) == 1:
        return products[0].view(*shape)
    return torch.cat(products, 1).view(out, len(products), shape[1]).transpose(1, 2).reshape(*shape)


def _by_offset_depthwise(grad: Tensor, x: Tensor, shape: Sequence[int], moves: ConvolutionArgs) -> Tensor:
    """Compute :func:`weight_gradient` for one channel per group: dL/dw[c, 0, k] = sum_{n, p} dL/dy[n, c, p] *
    window_k[n, c, p].

    Channels are last, so that the sums run over leading axes and windows are long copies.
    """
    rank = len(shape) - 2
    last = (0, *range(2, 2 + rank), 1)
    padded, grad = _pad(x.permute(last), moves.padding, first_axis=1), grad.permute(last)
    sums = [
        (grad * _window(padded, offset, grad.shape[1:-1], moves, first_axis=1)).sum(list(range(rank + 1)))
        for offset in itertools.product(*(range(size) for size in shape[2:]))
    ]
    return torch.stack(sums, 1).view(*shape)


def _pad(x: Tensor, padding: list[int], first_axis: int) -> Tensor:
    """Pad the spatial axes, which start at ``first_axis``, with zeros."""
    if not any(padding):
        return x
    behind = x.dim() - first_axis - len(padding)
    pads = [0, 0] * behind + [amount for pad in reversed(padding) for amount in (pad, pad)]
    padded: Tensor = _aten.constant_pad_nd(x, pads, 0.0)
    return padded


def _window(
    padded: Tensor, offset: tuple[int, ...], size: Sequence[int], moves: ConvolutionArgs, first_axis: int
) -> Tensor:
    """Return the inputs that kernel position ``offset`` reads, one per output position.

    Args:
        padded: padded input.
        offset: position in the kernel.
        size: spatial sizes of the output.
        moves: arguments of the convolution.
        first_axis: first spatial axis of ``padded``.
    """
    for i, k in enumerate(offset):
        start = k * moves.dilation[i]
        stop = start + (size[i] - 1) * moves.stride[i] + 1
        axis = first_axis + i
        if (start, stop, moves.stride[i]) != (0, padded.shape[axis], 1):
            padded = _aten.slice.Tensor(padded, axis, start, stop, moves.stride[i])
    return padded


def _places(images: Sequence[int], size: Sequence[int], moves: ConvolutionArgs) -> Tensor:
    """Return the row numbers [N P] in ``images`` [N, *S] that the first kernel position reads; ``size`` are the sizes
    of the output.
    """
    batch, *space = images
    starts = itertools.product(*(range(0, n * s, s) for n, s in zip(size, moves.stride, strict=True)))
    first = torch.tensor([_row(space, start) for start in starts])
    return (torch.arange(batch).unsqueeze(1) * math.prod(space) + first).reshape(-1)


def _row(space: Sequence[int], place: Sequence[int]) -> int:
    """Return the flat position of ``place`` in the spatial axes of sizes ``space``."""
    row = 0
    for size, at in zip(space, place, strict=True):
        row = row * size + at
    return row


# Input gradients: up to this many kernel offsets by a flipped kernel, above by a transposed convolution if there
# are this many positions.
FLIPPED_OFFSETS = 9
TRANSPOSED_POSITIONS = 64


def convolution(x: Tensor, w: Tensor, bias: Tensor | None, *args: Any) -> Tensor:
    """Compute a convolution in another form if it is depthwise on small planes or 3 x 3 with many channels; else
    return NotImplemented (the op is kept).

    See :mod:`edgefl_export.decompositions.depthwise` and :mod:`edgefl_export.decompositions.winograd`. ``args`` as in
    :meth:`ConvolutionArgs.of`.
    """
    rank = w.dim() - 2
    moves = ConvolutionArgs.of(rank, *args)
    if moves.transposed or x.dim() != w.dim():
        return DECLINED
    if (tiled := _winograd_plan(x, w, moves)) is not None:
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
) -> depthwise.DepthwiseGeometry:
    sizes = (x[2:], outputs, w[2:], moves.stride, moves.padding, moves.dilation)
    return depthwise.DepthwiseGeometry(*(tuple(size) for size in sizes))


def convolution_backward(
    grad: Tensor, x: Tensor, w: Tensor, bias_sizes: list[int] | None, *args: Any
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Compute (dL/dx, dL/dw, dL/db), with None for those that ``output_mask``, the last of ``args``, does not request.

    Shapes: x [N, C, *S], w [O, C / groups, *K]. The rest of ``args`` is as in :meth:`ConvolutionArgs.of`.
    """
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
    tiled = None if transposed else _winograd_plan(x, w, moves)
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


def _winograd_plan(x: Tensor, w: Tensor, moves: ConvolutionArgs) -> winograd.WinogradPlan | None:
    """Return the Winograd plan of a convolution and its gradients, or None if it has another kernel than 3 x 3 or gains
    nothing.
    """
    plain = {*moves.stride, *moves.dilation, moves.groups} == {1}
    return winograd.plan(x.shape, w.shape, moves.padding, x.dtype) if plain else None


def _bias_gradient(grad: Tensor) -> Tensor:
    return grad.sum([axis for axis in range(grad.dim()) if axis != 1])


def _input_gradient_of_transposed(grad: Tensor, x: Tensor, w: Tensor, moves: ConvolutionArgs) -> Tensor:
    """Compute dL/dx of a transposed convolution: the convolution of dL/dy with the same kernel."""
    zeros = [0] * len(moves.stride)
    gradient: Tensor = _aten.convolution(
        grad, w, None, moves.stride, moves.padding, moves.dilation, False, zeros, moves.groups
    )
    for axis, size in enumerate(x.shape[2:], 2):  # with an output padding it may reach further than the input
        gradient = gradient.narrow(axis, 0, size) if gradient.shape[axis] > size else gradient
    return gradient


def _input_gradient(grad: Tensor, x: Tensor, w: Tensor, moves: ConvolutionArgs) -> Tensor:
    """Compute dL/dx[n, c, q] = sum_{o, k} w[o, c, k] dL/dy[n, o, (q + padding - k * dilation) / stride] where divisible."""
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
    """Exchange input and output channels of a kernel: [O, C/g, *K] -> [C, O/g, *K]."""
    out, per_group, *kernel = w.shape
    if groups == 1:
        return w.transpose(0, 1)
    split = w.view(groups, out // groups, per_group, *kernel).transpose(1, 2)
    return split.reshape(groups * per_group, out // groups, *kernel)


RULES: Rules = {
    _aten.convolution.default: convolution,
    _aten.convolution_backward.default: convolution_backward,
}
