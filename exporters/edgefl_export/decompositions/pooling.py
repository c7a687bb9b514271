"""Pooling forwards that ONNX lacks, and gradients. Tensors are [N, C, H, W] or [C, H, W] and float32, or have three axes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from edgefl_export.decompositions.convolution import per_axis
from edgefl_export.operators import DECLINED, Rules

_aten = torch.ops.aten

# Windows of so many entries at the most are gone through one by one.
FEW_ENTRIES = 9


@dataclass(frozen=True)
class PoolingWindows:
    """Arguments of a pooling op by axis. ``divisor`` and ``include_pad`` are for averages only."""

    kernel: list[int]
    stride: list[int]
    padding: list[int]
    dilation: list[int]
    ceil_mode: bool
    include_pad: bool = True
    divisor: int | None = None

    @classmethod
    def of(
        cls,
        axes: int,
        kernel: Sequence[int],
        stride: Sequence[int] | None = None,
        padding: Sequence[int] | None = None,
        dilation: Sequence[int] | None = None,
        ceil_mode: bool = False,
    ) -> PoolingWindows:
        """Return the windows of a maximum over ``axes``, from the arguments of the op after the input."""
        given = (kernel, stride or kernel, padding or [0], dilation or [1])
        kernels, strides, paddings, dilations = (per_axis(values, axes) for values in given)
        return cls(kernels, strides, paddings, dilations, ceil_mode)

    @classmethod
    def of_average(
        cls,
        axes: int,
        kernel: Sequence[int],
        stride: Sequence[int] | None = None,
        padding: Sequence[int] | None = None,
        ceil_mode: bool = False,
        include_pad: bool = True,
        divisor: int | None = None,
    ) -> PoolingWindows:
        """Return the windows of an average over ``axes``, from the arguments of the op after the input."""
        windows = cls.of(axes, kernel, stride, padding, None, ceil_mode)
        return replace(windows, include_pad=include_pad, divisor=divisor)

    def along(self, x: Tensor) -> Iterator[tuple[int, int, int, int, int]]:
        """Yield (size, kernel, stride, padding, dilation) for each pooled axis of ``x``."""
        sizes = x.shape[-len(self.kernel) :]
        return zip(sizes, self.kernel, self.stride, self.padding, self.dilation, strict=True)

    def ends(self, x: Tensor) -> list[int]:
        """Return for each pooled axis the number of entries by which the last window reaches beyond ``x``."""
        return [end_padding(*axis, self.ceil_mode) for axis in self.along(x)]


def max_pool2d(x: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    """Return (maxima, flat positions) if the last dilated window in ceil mode reaches further than ONNX's padding can;
    else return NotImplemented (the op is kept).

    Rows and columns of -inf are added at the end of the input, and the positions are corrected. ``args`` as in
    :meth:`PoolingWindows.of`.
    """
    where = PoolingWindows.of(2, *args)
    ends = where.ends(x)
    if all(end < k for end, k in zip(ends, where.kernel, strict=True)):
        return DECLINED
    return pool_padded(x, where, ends, _aten.max_pool2d_with_indices)


def pool_padded(
    x: Tensor, where: PoolingWindows, ends: list[int], pool: Callable[..., tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor]:
    """Pad the last axes of x with -inf at their ends, apply ``pool``, and return (maxima, positions as in x).

    Args:
        x: input.
        where: windows.
        ends: entries that windows need beyond the end of each axis.
        pool: max pooling op that returns maxima and positions.
    """
    axes = len(ends)
    behind = [max(end - begin, 0) for end, begin in zip(ends, where.padding, strict=True)]
    sides = [side for more in reversed(behind) for side in (0, more)]
    padded = _aten.constant_pad_nd(x, sides, -math.inf)
    values, place = pool(padded, where.kernel, where.stride, where.padding, where.dilation)
    return values, in_larger(place, padded.shape[-axes:], x.shape[-axes:])


def in_larger(place: Tensor, own: Sequence[int], other: Sequence[int]) -> Tensor:
    """Convert flat positions ``place`` in a block of sizes ``own`` to flat positions in a block of sizes ``other``.

    Both blocks begin at the same entry, so a position keeps its index along each axis.
    """
    rest, unit = place, 1
    for size, wanted in zip(reversed(own[1:]), reversed(other[1:]), strict=True):
        rest = torch.div(rest, size, rounding_mode="trunc")
        place = place + rest * ((wanted - size) * unit)
        unit *= wanted
    return place


def max_pool2d_backward(grad: Tensor, x: Tensor, *args: Any) -> Tensor:
    """Compute dL/dx[n, c, q] = sum of dL/dy[n, c, p] over windows p whose maximum is at q.

    ``args`` as in :meth:`PoolingWindows.of`, then the positions of the maxima, flat in H * W.
    """
    *how, indices = args
    where = PoolingWindows.of(2, *how)
    plain = not any(where.padding) and {*where.dilation} == {1} and not where.ceil_mode
    if plain and where.kernel == where.stride and math.prod(where.kernel) <= FEW_ENTRIES:
        return _to_first_maxima(grad, x, where.kernel)
    return to_positions(grad, x, indices)


def _to_first_maxima(grad: Tensor, x: Tensor, kernel: list[int]) -> Tensor:
    """Compute the gradient for windows that do not overlap: it goes to the first maximum of a window, row by row.

    Positions are neither kept nor computed in the forward pass, which takes ONNX Runtime ten times as long. In a run that
    has diverged, an infinite gradient also leaves NaN in the last entry of its window, and the gradient of NaN goes there.
    """
    (height, width), (rows, columns) = kernel, grad.shape[-2:]
    maxima = _aten.max_pool2d_with_indices(x, kernel, kernel)[0].reshape(-1, rows, columns)
    cells = x[..., : rows * height, : columns * width].reshape(-1, rows, height, columns, width)
    rest, zero = grad.reshape(-1, rows, columns), torch.zeros((), dtype=grad.dtype)
    lines = []
    for i in range(height):
        taken = []
        for j in range(width):
            last = (i, j) == (height - 1, width - 1)
            taken.append(rest if last else torch.where(cells[:, :, i, :, j] >= maxima, rest, zero))
            rest = rest - taken[-1]
        lines.append(torch.stack(taken, -1).flatten(-2))
    covered = torch.stack(lines, 2).view(*x.shape[:-2], rows * height, columns * width)
    sides = [0, x.shape[-1] - columns * width, 0, x.shape[-2] - rows * height]
    return _aten.constant_pad_nd(covered, sides, 0.0) if any(sides) else covered


def to_positions(grad: Tensor, x: Tensor, indices: Tensor, axes: int = 2) -> Tensor:
    """Return zeros shaped like x, with each entry of ``grad`` added at its flat position in the last ``axes`` axes."""
    planes, area = x.shape[:-axes].numel(), x.shape[-axes:].numel()
    empty = torch.zeros((planes, area), dtype=grad.dtype)
    return empty.scatter_add(1, indices.reshape(planes, -1), grad.reshape(planes, -1)).view(x.shape)


def adaptive_max_pool(
    x: Tensor, output_size: list[int], pool: Callable[..., tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor]:
    """Return (maxima over inputs floor(i n / m) .. ceil((i + 1) n / m) along each of the last axes, their flat
    positions).

    If the sizes divide, this is plain max pooling by ``pool``. Otherwise windows differ in length by an entry. The
    shorter ones repeat their last entry, which is never the first maximum, so the position within a window determines
    that in the input.

    Args:
        x: input.
        output_size: number m of outputs of each of the last axes.
        pool: max pooling op that returns maxima and positions.
    """
    axes = len(output_size)
    sizes, lead = list(x.shape[-axes:]), x.shape[:-axes]
    if all(size % count == 0 for size, count in zip(sizes, output_size, strict=True)):
        kernel = [size // count for size, count in zip(sizes, output_size, strict=True)]
        return pool(x, kernel, kernel)
    spans = [_adaptive_windows(size, count) for size, count in zip(sizes, output_size, strict=True)]
    wide = [max(stop - start for start, stop in axis) for axis in spans]
    cells, first = x, torch.zeros((), dtype=torch.int64)
    for at, (axis, width) in enumerate(zip(spans, wide, strict=True)):
        entries = [min(start + k, stop - 1) for start, stop in axis for k in range(width)]
        cells = cells.index_select(at - axes, torch.tensor(entries))
        first = first.unsqueeze(-1) * sizes[at] + torch.tensor([start for start, _ in axis])
    pairs = [each for both in zip(output_size, wide, strict=True) for each in both]
    outer = range(len(lead), len(lead) + 2 * axes, 2)
    order = [*range(len(lead)), *outer, *(at + 1 for at in outer)]
    cells = cells.view(*lead, *pairs).permute(order).reshape(*lead, *output_size, -1)
    values, place = cells.max(-1)
    return values, first + in_larger(place, wide, sizes)


def avg_pool2d(x: Tensor, *args: Any) -> Tensor:
    """Compute :func:`avg_pool` if ONNX cannot express the op: for a user-defined divisor or ceil mode; else return
    NotImplemented (the op is kept).

    ``args`` as in :meth:`PoolingWindows.of_average`.
    """
    where = PoolingWindows.of_average(2, *args)
    return avg_pool(2, x, *args) if where.divisor or where.ceil_mode else DECLINED


def avg_pool(axes: int, x: Tensor, *args: Any) -> Tensor:
    """Compute y = x times the 0/1 window matrix [windows, size] of each of the last ``axes`` axes, / count.

    ``args`` as in :meth:`PoolingWindows.of_average`.
    """
    matrices, scale = _average(x, PoolingWindows.of_average(axes, *args))
    return along_all(x, [matrix.t() for matrix in matrices]) * scale


def avg_pool_backward(axes: int, grad: Tensor, x: Tensor, *args: Any) -> Tensor:
    """Compute dL/dx = dL/dy / count times the window matrices: each output spreads its gradient evenly over its window.

    ``args`` as in :meth:`PoolingWindows.of_average`.
    """
    matrices, scale = _average(x, PoolingWindows.of_average(axes, *args))
    return along_all(grad * scale, matrices)


def adaptive_avg_pool(x: Tensor, output_size: list[int]) -> Tensor:
    """Compute averages over inputs floor(i n / m) .. ceil((i + 1) n / m) of each of the last axes; a mean if all m = 1."""
    axes = len(output_size)
    if {*output_size} == {1}:
        return x.mean(list(range(-axes, 0)), keepdim=True)
    sizes = zip(x.shape[-axes:], output_size, strict=True)
    return along_all(x, [adaptive_matrix(size, count, x).t() for size, count in sizes])


def adaptive_avg_pool_backward(axes: int, grad: Tensor, x: Tensor) -> Tensor:
    """Compute dL/dx = dL/dy times the averaging matrices of the forward pass, over the last ``axes`` axes."""
    if {*grad.shape[-axes:]} == {1}:
        return (grad * (1.0 / x.shape[-axes:].numel())).expand(x.shape)
    sizes = zip(x.shape[-axes:], grad.shape[-axes:], strict=True)
    return along_all(grad, [adaptive_matrix(size, count, x) for size, count in sizes])


def along_all(x: Tensor, matrices: list[Tensor]) -> Tensor:
    """Multiply each of the last axes of x by its matrix [old, new]. The result is contiguous, so a flatten is a view."""
    for axis, matrix in enumerate(reversed(matrices), 1):
        x = along(x, -axis, matrix)
    return x.contiguous()


def _average(x: Tensor, where: PoolingWindows) -> tuple[list[Tensor], Tensor | float]:
    """Return (window matrix of each axis, 1 / count); 1 / count is a number, or a tensor if it differs between windows."""
    spans, space = spans_of(x, where), x.shape[-len(where.kernel) :]
    matrices = [windows(each, size, x.dtype) for each, size in zip(spans, space, strict=True)]
    if where.divisor:
        return matrices, 1.0 / where.divisor
    entries = [counts(each, size, where.include_pad) for each, size in zip(spans, space, strict=True)]
    if all(len({*each}) == 1 for each in entries):
        return matrices, 1.0 / math.prod(each[0] for each in entries)
    count = torch.tensor(entries[0])
    for each in entries[1:]:
        count = count.unsqueeze(-1) * torch.tensor(each)
    return matrices, 1.0 / count.to(x.dtype)


def count_windows(size: int, kernel: int, stride: int, padding: int, dilation: int, ceil_mode: bool) -> int:
    """Return the number of windows along an axis. In ceil mode a last window may reach beyond the input, but must begin
    inside.
    """
    room = size + 2 * padding - dilation * (kernel - 1) - 1
    if not ceil_mode:
        return room // stride + 1
    count = -(-room // stride) + 1
    return count - 1 if (count - 1) * stride >= size + padding else count


def end_padding(size: int, kernel: int, stride: int, padding: int, dilation: int, ceil_mode: bool) -> int:
    """Return the padding behind the input that the last window needs. Runtimes disagree about the windows of ceil mode."""
    last = (count_windows(size, kernel, stride, padding, dilation, ceil_mode) - 1) * stride - padding
    return max(last + dilation * (kernel - 1) + 1 - size, 0)


def spans_of(x: Tensor, where: PoolingWindows) -> list[list[tuple[int, int]]]:
    """Return (first, one past last) position of each window, by axis; windows may reach into the padding and beyond."""
    spans = []
    for size, kernel, stride, padding, _ in where.along(x):
        count = count_windows(size, kernel, stride, padding, 1, where.ceil_mode)
        starts = [i * stride - padding for i in range(count)]
        spans.append([(start, min(start + kernel, size + padding)) for start in starts])
    return spans


def counts(windows: list[tuple[int, int]], size: int, include_pad: bool) -> list[int]:
    if include_pad:
        return [stop - start for start, stop in windows]
    return [min(stop, size) - max(start, 0) for start, stop in windows]


def _adaptive_windows(size: int, count: int) -> list[tuple[int, int]]:
    return [(i * size // count, -(-(i + 1) * size // count)) for i in range(count)]


def adaptive_matrix(size: int, count: int, like: Tensor) -> Tensor:
    spans = _adaptive_windows(size, count)
    lengths = torch.tensor([[float(stop - start)] for start, stop in spans], dtype=like.dtype)
    return windows(spans, size, like.dtype) / lengths


# Over three axes. Tensors are [N, C, D, H, W] or [C, D, H, W].


def max_pool3d(x: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    """Return (maxima, flat positions) in ceil mode, in which runtimes count windows differently.

    Entries of -inf are added at the end of the input, and the positions are corrected. ``args`` as in
    :meth:`PoolingWindows.of`. Without ceil mode return NotImplemented (the op is kept).
    """
    where = PoolingWindows.of(3, *args)
    return (
        pool_padded(x, where, where.ends(x), _aten.max_pool3d_with_indices) if where.ceil_mode else DECLINED
    )


def max_pool3d_backward(grad: Tensor, x: Tensor, *args: Any) -> Tensor:
    """Compute dL/dx[q] = sum of dL/dy[p] over windows p whose maximum is at q. The last of ``args`` are the positions,
    flat in D * H * W.
    """
    return to_positions(grad, x, args[-1], 3)


# Linear maps of single axes by matrices that are computed in the graph.
#
# Such a matrix is sparse and regular, and may have more entries than the model has weights. Written as a comparison of
# positions it takes a few numbers in the file, and runtimes fold it once, when they load.


def along(x: Tensor, axis: int, matrix: Tensor) -> Tensor:
    """Compute y[.., j, ..] = sum_i x[.., i, ..] matrix[i, j] along ``axis``; the result is contiguous only if ``axis``
    is the last one.

    It is one product of two matrices: a batched one would repeat the matrix for each plane.
    """
    moved = x.movedim(axis, -1)
    y = moved.reshape(-1, matrix.shape[0]) @ matrix
    return y.view(*moved.shape[:-1], matrix.shape[1]).movedim(-1, axis)


def windows(spans: Sequence[tuple[int, int]], size: int, dtype: torch.dtype) -> Tensor:
    """Return a matrix [windows, size]: 1 from the first to before the last position of each span, which may lie outside."""
    starts, stops = column([start for start, _ in spans]), column([stop for _, stop in spans])
    place = torch.arange(size)
    return ((starts <= place) & (place < stops)).to(dtype)


def taps(rows: Sequence[Sequence[tuple[int, float]]], size: int, dtype: torch.dtype) -> Tensor:
    """Return a matrix [rows, size] of weights from (position, weight) pairs, equally many per row; equal positions add."""
    total = torch.zeros((), dtype=dtype)
    for pairs in zip(*rows, strict=True):
        chosen = column([place for place, _ in pairs]) == torch.arange(size)
        total = total + chosen.to(dtype) * column([weight for _, weight in pairs], dtype)
    return total


def column(values: Sequence[float], dtype: torch.dtype = torch.int64) -> Tensor:
    """Return ``values`` as a tensor [values, 1]."""
    return torch.tensor(values, dtype=dtype).unsqueeze(1)


RULES: Rules = {
    _aten.adaptive_max_pool2d.default: partial(adaptive_max_pool, pool=_aten.max_pool2d_with_indices),
    _aten.adaptive_max_pool2d_backward.default: to_positions,
    _aten.avg_pool2d.default: avg_pool2d,
    _aten.max_pool2d_with_indices.default: max_pool2d,
    _aten.max_pool2d_with_indices_backward.default: max_pool2d_backward,
    _aten.avg_pool2d_backward.default: partial(avg_pool_backward, 2),
    _aten._adaptive_avg_pool2d.default: adaptive_avg_pool,
    _aten._adaptive_avg_pool2d_backward.default: partial(adaptive_avg_pool_backward, 2),
    _aten.adaptive_max_pool3d.default: partial(adaptive_max_pool, pool=_aten.max_pool3d_with_indices),
    _aten.adaptive_max_pool3d_backward.default: partial(to_positions, axes=3),
    _aten.max_pool3d_with_indices.default: max_pool3d,
    _aten.max_pool3d_with_indices_backward.default: max_pool3d_backward,
    _aten.avg_pool3d.default: partial(avg_pool, 3),
    _aten.avg_pool3d_backward.default: partial(avg_pool_backward, 3),
    _aten._adaptive_avg_pool3d.default: adaptive_avg_pool,
    _aten._adaptive_avg_pool3d_backward.default: partial(adaptive_avg_pool_backward, 3),
}
