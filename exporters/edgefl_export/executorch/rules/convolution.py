"""Two-dimensional convolutions as products that XNNPACK runs well, channels last: x [N, H, W, C], w [O, C, KH, KW].

XNNPACK convolves with weights that never change only, so these are products with movement around them:

* the KW horizontal shifts of x side by side are m [N, H, W', KW * C]: three times a tensor, not nine times as with all
  columns, and cheap, because each entry is a run of C numbers;
* y[p] = sum over i of (m w_i)[p + i - padding]: products first, then KH vertical shifts of their results, which are
  slices of whole rows. No product is computed for a row of padding;
* the input gradient is the same with dL/dy for x and the shifts reversed;
* the weight gradient is one product: KH vertical shifts of x, transposed, with the horizontal shifts of dL/dy that the
  input gradient needs anyway. All KH * KW offsets come out at once.

With a stride, rows and columns are split into phases first. A large batch is taken in parts: what is moved of all of it
would be the most that a step holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from edgefl_export.decompositions import convolution as plain
from edgefl_export.decompositions.convolution import ConvolutionArgs
from edgefl_export.executorch.rules.shifts import (
    cut,
    interleave,
    join,
    pad,
    place,
    shifts,
    taps,
    total,
    window,
)


@dataclass(frozen=True)
class KernelArgs:
    """Stride, padding and dilation of a two-dimensional kernel, each as (rows, columns)."""

    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]

    def starts(self, kernel: int, axis: int) -> list[int]:
        """Return the position in the input that each of ``kernel`` positions along ``axis`` reads for output 0."""
        return [i * self.dilation[axis] - self.padding[axis] for i in range(kernel)]

    def met(self, kernel: int, phase: int, axis: int) -> list[tuple[int, int]]:
        """Return the kernel positions that read the inputs phase, phase + stride, ... along ``axis``.

        Each comes as (kernel position, output for which it reads input ``phase``).
        """
        stride = self.stride[axis]
        behind = [(i, phase - start) for i, start in enumerate(self.starts(kernel, axis))]
        return [(i, distance // stride) for i, distance in behind if distance % stride == 0]

    def all_met(self, kernel: Sequence[int]) -> list[list[list[tuple[int, int]]]]:
        """Return :meth:`met` for both axes and all phases: ``result[axis][phase]``."""
        return [
            [self.met(kernel[axis], phase, axis) for phase in range(self.stride[axis])] for axis in range(2)
        ]

    def outputs(self, x: Tensor, kernel: Sequence[int]) -> list[int]:
        """Return [rows, columns] of the output for x [N, H, W, C] and ``kernel`` (rows, columns)."""
        return [
            (x.shape[1 + a] + 2 * self.padding[a] - self.dilation[a] * (kernel[a] - 1) - 1) // self.stride[a]
            + 1
            for a in range(2)
        ]


MOST_AT_ONCE = 3 * 2**17
"""Numbers that are moved and multiplied for a part of the batch, before the next: of what is put side by side and what is
made of it. They lie in a processor's own cache, and in the way of nothing that waits for the backward pass. Each part is
some ten nodes more."""


def product(x: Tensor, matrix: Tensor) -> Tensor:
    """Compute the matrix product of x [.., K] and ``matrix`` [K, O]."""
    return torch.mm(x.reshape(-1, x.shape[-1]), matrix).view(*x.shape[:-1], matrix.shape[-1])


def columns(x: Tensor, kernel: int, count: int, moves: KernelArgs) -> Tensor:
    """Return the inputs of all kernel columns side by side: [N, H, count, kernel * C] for ``count`` output columns."""
    return join(taps(x, 2, kernel, count, moves.stride[1], moves.padding[1], moves.dilation[1]), 3)


def dense_forward(x: Tensor, w: Tensor, moves: KernelArgs) -> Tensor:
    """Compute y [N, H', W', O] with y[p] = sum_{c, k} w[o, c, k] x[p * stride + k * dilation - padding]."""
    width = moves.outputs(x, w.shape[2:])[1]
    rows = _by_row(w.permute(2, 3, 1, 0))
    return join([_dense_forward(cut(x, 0, *part), w, rows, moves) for part in _parts(x, w.shape, width)], 0)


def _parts(x: Tensor, kernel: Sequence[int], width: int) -> list[tuple[int, int]]:
    """Return (begin, end) of about equal parts of the batch of x [N, H, W, ..], of up to :data:`MOST_AT_ONCE` numbers each.

    ``kernel`` is the shape [O, C, KH, KW], ``width`` the number of output columns.
    """
    out, per, tall, wide = kernel
    numbers = x.shape[0] * x.shape[1] * width * (wide * x.shape[3] + tall * (out + per - x.shape[3]))
    count = -(-x.shape[0] // max(1, min(x.shape[0], -(-numbers // MOST_AT_ONCE))))
    return [(start, min(start + count, x.shape[0])) for start in range(0, x.shape[0], count)]


def _dense_forward(x: Tensor, w: Tensor, rows: Sequence[Tensor], moves: KernelArgs) -> Tensor:
    tall, wide = w.shape[2:]
    height, width = moves.outputs(x, (tall, wide))
    m = columns(x, wide, width, moves)
    if moves.stride[0] > 1:
        parts = taps(m, 1, tall, height, moves.stride[0], moves.padding[0], moves.dilation[0])
        return total([product(part, rows[i]) for i, part in enumerate(parts)], ())
    return _sum_shifted(m, rows, moves.starts(tall, 0), height)


def _by_row(kernel: Tensor) -> list[Tensor]:
    """Return the kernel [KH, KW, K, M] as KH matrices [KW * K, M]."""
    tall, wide, depth, out = kernel.shape
    matrix = kernel.reshape(tall * wide * depth, out)
    return [cut(matrix, 0, i * wide * depth, (i + 1) * wide * depth) for i in range(tall)]


def _sum_shifted(m: Tensor, rows: Sequence[Tensor], starts: Sequence[int], height: int) -> Tensor:
    """Multiply m [N, H, W, K] by each matrix [K, O], shift the products along the rows and add them: [N, height, W, O].

    ``starts`` are the first rows of the products; rows outside of a product count as 0.
    """
    flat = m.reshape(-1, m.shape[-1])
    shape = (*m.shape[:3], rows[0].shape[1])
    met = [(start, row) for start, row in zip(starts, rows, strict=True) if -height < start < m.shape[1]]
    parts = [window(torch.mm(flat, row).view(shape), 1, start, height) for start, row in met]
    return total(parts, (shape[0], height, *shape[2:]))


def spread(grad: Tensor, wide: int, width: int, moves: KernelArgs) -> Tensor:
    """Return dL/dy shifted for each kernel column, side by side: [N, H', W', O] -> [N, H', width, wide * O], for stride 1.

    ``wide`` is the number of kernel columns, ``width`` that of input columns. The gradients of input and weight are both
    computed from the result.
    """
    return join(shifts(grad, 2, [-start for start in moves.starts(wide, 1)], width), 3)


def dense_input_gradient(grad: Tensor, w: Tensor, size: Sequence[int], moves: KernelArgs) -> Tensor:
    """Compute dL/dx [N, *size, C] for dL/dy [N, H', W', O]. It is also the transposed convolution of ``grad`` with w."""
    grads = (cut(grad, 0, *part) for part in _parts(grad, w.shape, size[1]))
    if moves.stride == (1, 1):
        rows = _by_row(w.permute(2, 3, 0, 1))
        spreads = (spread(part, w.shape[3], size[1], moves) for part in grads)
        return join([from_spread(m, rows, size[0], moves) for m in spreads], 0)
    return join([_by_phase(part, w, size, moves) for part in grads], 0)


def from_spread(m: Tensor, rows: Sequence[Tensor], height: int, moves: KernelArgs) -> Tensor:
    """Compute dL/dx [N, height, width, C] for stride 1 from the result ``m`` of :func:`spread`.

    ``rows`` are the matrices of the flipped kernel.
    """
    return _sum_shifted(m, rows, [-start for start in moves.starts(len(rows), 0)], height)


def _by_phase(grad: Tensor, w: Tensor, size: Sequence[int], moves: KernelArgs) -> Tensor:
    """Compute dL/dx for any stride: rows a, a + s, .. and columns b, b + t, .. are convolutions with stride 1.

    Each of them uses the kernel positions that lead to its rows and columns.
    """
    out, per, tall, wide = w.shape
    height, width = (-(-size[axis] // moves.stride[axis]) for axis in range(2))
    matrix = w.permute(2, 3, 0, 1).reshape(tall * wide * out, per)
    blocks = [cut(matrix, 0, k * out, (k + 1) * out) for k in range(tall * wide)]
    lines: list[list[Tensor | None]] = [[] for _ in range(moves.stride[0])]
    for b in range(moves.stride[1]):
        across = moves.met(wide, b, 1)
        m = join(shifts(grad, 2, [start for _, start in across], width), 3) if across else None
        for a, line in enumerate(lines):
            down = moves.met(tall, a, 0)
            rows = [join([blocks[i * wide + j] for j, _ in across], 0) for i, _ in down if across]
            starts = [start for _, start in down]
            line.append(_sum_shifted(m, rows, starts, height) if m is not None and rows else None)
    whole = interleave([interleave(line, 2, size[1]) for line in lines], 1, size[0])
    return torch.zeros((grad.shape[0], *size, per)) if whole is None else whole


def dense_weight_gradient(grad: Tensor, x: Tensor, kernel: Sequence[int], moves: KernelArgs) -> Tensor:
    """Compute dL/dw [O, C, KH, KW] for dL/dy [N, H', W', O] and x [N, H, W, C]."""
    shape = (grad.shape[3], x.shape[3], *kernel)
    found: Tensor | None = None
    for part in _parts(grad, shape, x.shape[2]):
        found = _add(found, _dense_weight_gradient(cut(grad, 0, *part), cut(x, 0, *part), kernel, moves))
    assert found is not None
    return found


def _add(whole: Tensor | None, part: Tensor) -> Tensor:
    """Add ``part`` to ``whole``, which is None at first. Adding at once avoids holding all parts until the end."""
    return part if whole is None else whole + part


def dense_gradients(grad: Tensor, x: Tensor, w: Tensor, moves: KernelArgs) -> tuple[Tensor, Tensor]:
    """Compute dL/dx [N, H, W, C] and dL/dw [O, C, KH, KW] for dL/dy [N, H', W', O].

    The batch is processed in parts, so that the columns that both gradients read exist for one part at a time.
    """
    if moves.stride != (1, 1):
        return dense_input_gradient(grad, w, x.shape[1:3], moves), dense_weight_gradient(
            grad, x, w.shape[2:], moves
        )
    rows = _by_row(w.permute(2, 3, 0, 1))
    of_x, of_w = [], None
    for part in _parts(grad, w.shape, x.shape[2]):
        m = spread(cut(grad, 0, *part), w.shape[3], x.shape[2], moves)
        of_w = _add(of_w, of_spread(m, cut(x, 0, *part), w.shape[2:], moves))
        of_x.append(from_spread(m, rows, x.shape[1], moves))
    assert of_w is not None
    return join(of_x, 0), of_w


def _dense_weight_gradient(grad: Tensor, x: Tensor, kernel: Sequence[int], moves: KernelArgs) -> Tensor:
    if moves.stride == (1, 1):
        return of_spread(spread(grad, kernel[1], x.shape[2], moves), x, kernel, moves)
    tall, wide = kernel
    m = columns(x, wide, grad.shape[2], moves)
    parts = taps(m, 1, tall, grad.shape[1], moves.stride[0], moves.padding[0], moves.dilation[0])
    rows = grad.permute(3, 0, 1, 2).reshape(grad.shape[3], -1)
    gradient = join([one_product(rows, part.reshape(-1, m.shape[-1])) for part in parts], 1)
    return gradient.view(grad.shape[3], tall, wide, x.shape[3]).permute(0, 3, 1, 2)


def of_spread(m: Tensor, x: Tensor, kernel: Sequence[int], moves: KernelArgs) -> Tensor:
    """Compute dL/dw for stride 1 from the result m [N, H', W, KW * O] of :func:`spread`, all offsets in one product."""
    tall, wide = kernel
    starts, height = moves.starts(tall, 0), m.shape[1]
    before, behind = max(0, -min(starts)), max(0, max(starts) + height - x.shape[1])
    turned = pad(x, 1, before, behind).permute(3, 0, 1, 2)
    parts = [cut(turned, 2, before + start, before + start + height) for start in starts]
    rows = join(parts, 0).reshape(tall * x.shape[3], -1)
    gradient = one_product(rows, m.reshape(-1, m.shape[-1]))
    return gradient.view(tall, x.shape[3], wide, -1).permute(3, 1, 0, 2)


def one_product(rows: Tensor, matrix: Tensor) -> Tensor:
    """Compute [R, M] [M, K] as a batch of one, where M is by far the longest: XNNPACK packs the right factor faster then."""
    return torch.bmm(rows.unsqueeze(0), matrix.unsqueeze(0)).squeeze(0)


# Convolutions with one channel per group: a product per kernel offset, element by element, channels last.


def depthwise_forward(x: Tensor, w: Tensor, moves: KernelArgs) -> Tensor:
    """Compute y [N, H', W', C] for x [N, H, W, C] and w [C, 1, KH, KW]."""
    tall, wide = w.shape[2:]
    size = moves.outputs(x, (tall, wide))
    scales = _scales(w)
    parts = _inputs_by_offset(x, (tall, wide), size, moves)
    return total([part * scale for part, scale in zip(parts, scales, strict=True)], ())


def depthwise_input_gradient(grad: Tensor, w: Tensor, size: Sequence[int], moves: KernelArgs) -> Tensor:
    """Compute dL/dx [N, *size, C]: the sum over offsets of dL/dy times the weight, at the position that the offset read."""
    tall, wide = w.shape[2:]
    scales = _scales(w)
    parts = [[grad * scales[i * wide + j] for j in range(wide)] for i in range(tall)]
    return place(parts, size, moves.all_met((tall, wide)))


def depthwise_weight_gradient(grad: Tensor, x: Tensor, kernel: Sequence[int], moves: KernelArgs) -> Tensor:
    """Compute dL/dw [C, 1, KH, KW]: for each offset, the sum over samples and positions of dL/dy times the input it read."""
    parts = _inputs_by_offset(x, kernel, grad.shape[1:3], moves)
    sums = [(grad * part).sum([0, 1, 2]).view(-1, 1) for part in parts]
    return torch.cat(sums, 1).view(-1, 1, *kernel)


def _scales(w: Tensor) -> list[Tensor]:
    """Return the weights of each kernel offset, [C] each."""
    rows = w.flatten(1).permute(1, 0)
    return [rows[k : k + 1].reshape(-1) for k in range(rows.shape[0])]


def _inputs_by_offset(
    x: Tensor, kernel: Sequence[int], size: Sequence[int], moves: KernelArgs
) -> list[Tensor]:
    """Return the inputs that each kernel offset reads, [N, *size, C] each."""
    rows = taps(x, 1, kernel[0], size[0], moves.stride[0], moves.padding[0], moves.dilation[0])
    return [
        part
        for row in rows
        for part in taps(row, 2, kernel[1], size[1], moves.stride[1], moves.padding[1], moves.dilation[1])
    ]


# Convolutions of images with few channels: all kernel offsets as planes [N, KH * KW * C, H', W'], channels first.
#
# Runs of one to three numbers are too short to be copied one by one; whole rows of a plane are not. With so few channels
# the columns are small.

MOST_ROW = 16
"""Numbers per kernel row, KW * C, up to which a convolution has few channels."""
MOST_ALL = 128
"""Numbers per kernel, KH * KW * C, up to which it is."""


def has_few_channels(shape: Sequence[int]) -> bool:
    """Return True if a kernel [O, C, KH, KW] has few channels. Kernels of one position are plain products."""
    offsets = shape[2] * shape[3]
    return shape[3] * shape[1] <= MOST_ROW and offsets * shape[1] <= MOST_ALL and offsets > 1


def planes_forward(x: Tensor, w: Tensor, moves: KernelArgs) -> Tensor:
    """Compute y [N, H', W', O] for x [N, C, H, W]."""
    height, width = moves.outputs(x.permute(0, 2, 3, 1), (w.shape[2], w.shape[3]))
    planes = _planes(x, w.shape[2:], height, width, moves)
    y = torch.mm(
        planes.permute(0, 2, 1).reshape(-1, planes.shape[1]), w.permute(2, 3, 1, 0).reshape(-1, len(w))
    )
    return y.view(x.shape[0], height, width, w.shape[0])


def planes_weight_gradient(grad: Tensor, x: Tensor, kernel: Sequence[int], moves: KernelArgs) -> Tensor:
    """Compute dL/dw [O, C, KH, KW] for dL/dy [N, O, H', W'] and x [N, C, H, W]: a product per sample, then their sum."""
    planes = _planes(x, kernel, grad.shape[2], grad.shape[3], moves)
    last = grad.permute(0, 2, 3, 1).reshape(grad.shape[0], -1, grad.shape[1])
    gradient = torch.bmm(planes, last).sum(0)
    return gradient.view(*kernel, x.shape[1], grad.shape[1]).permute(3, 2, 0, 1)


def _planes(x: Tensor, kernel: Sequence[int], height: int, width: int, moves: KernelArgs) -> Tensor:
    """Return the inputs that each kernel offset reads: [N, KH * KW * C, H' * W'] for H' = ``height`` and W' = ``width``."""
    rows = taps(x, 2, kernel[0], height, moves.stride[0], moves.padding[0], moves.dilation[0])
    planes = [
        tap
        for row in rows
        for tap in taps(row, 3, kernel[1], width, moves.stride[1], moves.padding[1], moves.dilation[1])
    ]
    return join(planes, 1).reshape(x.shape[0], -1, height * width)


# Convolutions and their gradients for ExecuTorch, whose own kernels are reference code.
#
# Two-dimensional ones are products or, one channel per group, element-wise sums, channels last; one-dimensional ones are
# two-dimensional with one row. Transposed ones are input gradients. What is left goes the way it goes for ONNX.

_LAST, _FIRST = (0, 2, 3, 1), (0, 3, 1, 2)


def convolution(x: Tensor, w: Tensor, bias: Tensor | None, *args: Any) -> Tensor:
    """Compute y = x * w + bias for x [N, C, *S] and w [O, C / groups, *K], or w [C, O / groups, *K] if transposed.

    ``args`` are stride, padding, dilation, transposed, output padding and groups.
    """
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
    """Compute (dL/dx, dL/dw, dL/db), with None for those that ``output_mask``, the last of ``args``, does not request.

    The other ``args`` are stride, padding, dilation, transposed, output padding and groups.
    """
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


def _moves(rank: int, how: ConvolutionArgs) -> KernelArgs:
    """Return stride, padding and dilation for two axes; a one-dimensional convolution gets a row axis of size 1 in front."""
    rows = (1, 0, 1) if rank == 1 else (how.stride[0], how.padding[0], how.dilation[0])
    pairs = zip(rows, (how.stride[-1], how.padding[-1], how.dilation[-1]), strict=True)
    return KernelArgs(*pairs)


def _flat(x: Tensor, rank: int) -> Tensor:
    return x if rank == 2 else x.unsqueeze(2)


def _unflat(x: Tensor, rank: int) -> Tensor:
    return x if rank == 2 else x.squeeze(2)


def _one_to_one(w: Tensor, groups: int) -> bool:
    return w.shape[1] == 1 and w.shape[0] == groups and groups > 1


def _is_dense(w: Tensor, groups: int) -> bool:
    return not (_one_to_one(w, groups) or (groups == 1 and has_few_channels(w.shape)))


def _gradients(grad: Tensor, x: Tensor, w: Tensor, moves: KernelArgs, groups: int) -> tuple[Tensor, Tensor]:
    """Compute dL/dx [N, H, W, C] and dL/dw for dL/dy [N, O, H', W'] and x [N, C, H, W]."""
    grads, images = grad.permute(_LAST).chunk(groups, 3), x.permute(_LAST).chunk(groups, 3)
    parts = [dense_gradients(*each, moves) for each in zip(grads, images, w.chunk(groups, 0), strict=True)]
    return join([dx for dx, _ in parts], 3), join([dw for _, dw in parts], 0)


def _forward(x: Tensor, w: Tensor, moves: KernelArgs, groups: int) -> Tensor:
    """Compute y [N, H', W', O] for x [N, C, H, W]."""
    if groups == 1 and has_few_channels(w.shape):
        return planes_forward(x, w, moves)
    x = x.permute(_LAST)
    if _one_to_one(w, groups):
        return depthwise_forward(x, w, moves)
    kernels, images = w.chunk(groups, 0), x.chunk(groups, 3)
    return join([dense_forward(*pair, moves) for pair in zip(images, kernels, strict=True)], 3)


def _input_gradient(grad: Tensor, w: Tensor, size: list[int], moves: KernelArgs, groups: int) -> Tensor:
    """Compute dL/dx [N, *size, C] for dL/dy [N, O, H', W']."""
    grad = grad.permute(_LAST)
    if _one_to_one(w, groups):
        return depthwise_input_gradient(grad, w, size, moves)
    kernels, grads = w.chunk(groups, 0), grad.chunk(groups, 3)
    return join([dense_input_gradient(*pair, size, moves) for pair in zip(grads, kernels, strict=True)], 3)


def _weight_gradient(grad: Tensor, x: Tensor, shape: torch.Size, moves: KernelArgs, groups: int) -> Tensor:
    """Compute dL/dw of ``shape`` for dL/dy [N, O, H', W'] and x [N, C, H, W]."""
    kernel = shape[2:]
    if groups == 1 and has_few_channels(shape):
        return planes_weight_gradient(grad, x, kernel, moves)
    grad, x = grad.permute(_LAST), x.permute(_LAST)
    if shape[1] == 1 and shape[0] == groups > 1:
        return depthwise_weight_gradient(grad, x, kernel, moves)
    pairs = zip(grad.chunk(groups, 3), x.chunk(groups, 3), strict=True)
    return join([dense_weight_gradient(*pair, kernel, moves) for pair in pairs], 0)
