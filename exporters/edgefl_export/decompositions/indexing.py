"""Reading and writing by integer positions. Gradients of reads add up where a position occurs more than once.

Adding never uses ONNX's ScatterND: onnxruntime (seen with 1.31) runs its updates in parallel, and two threads that
add to the same row lose one of the two. ScatterElements runs them one after the other; with few rows a product
with the 0/1 matrix of the positions is faster, and exact as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch._ops import OpOverload

from edgefl_export.operators import DECLINED, Rules

_aten = torch.ops.aten

# Up to this many rows a matrix product adds faster than a scatter.
PRODUCT_ROWS = 128


def index(x: Tensor, indices: list[Tensor | None]) -> Tensor:
    """Return x[indices], where None selects a whole axis; rows are picked from a table (:func:`_table`).

    With a boolean mask return NotImplemented (the op is kept).
    """
    if any(index is not None and index.dtype == torch.bool for index in indices):
        return DECLINED
    axes = [axis for axis, index in enumerate(indices) if index is not None]
    tensors = [index for index in indices if index is not None]
    if len(tensors) == 1:
        (axis,), (places,) = axes, tensors
        shape = (*x.shape[:axis], *places.shape, *x.shape[axis + 1 :])
        return x.index_select(axis, places.reshape(-1)).reshape(shape)
    table, rest, _ = _table(x, axes)
    row = _row(tensors, [x.shape[axis] for axis in axes])
    front = table.index_select(0, row.reshape(-1)).reshape(*row.shape, *rest)
    return front if _in_front(axes) else front.permute(*_back(front.dim(), axes[0], row.dim()))


def index_put(x: Tensor, indices: list[Tensor | None], values: Tensor, accumulate: bool = False) -> Tensor:
    """Return x with ``values`` written at x[indices], or added if ``accumulate``; None selects a whole axis.

    For a boolean mask and a single value, the result is a selection. With other masks, and for writes at int64
    positions, return NotImplemented (the op is kept).
    """
    tensors = [index for index in indices if index is not None]
    if len(tensors) == 1 and tensors[0].dtype == torch.bool and values.numel() == 1 and not accumulate:
        (mask,) = tensors
        before = next(axis for axis, index in enumerate(indices) if index is not None)
        mask = mask.reshape([*[1] * before, *mask.shape, *[1] * (x.dim() - before - mask.dim())])
        return torch.where(mask, values.reshape(()), x)
    if any(index.dtype == torch.bool for index in tensors):
        return DECLINED
    if not accumulate:
        if not any(index.dtype == torch.int32 for index in tensors):
            return DECLINED
        wide = [index if index is None else index.long() for index in indices]  # ONNX scatters by int64 only
        written: Tensor = _aten.index_put(x, wide, values)
        return written
    axes = [axis for axis, index in enumerate(indices) if index is not None]
    table, rest, order = _table(x, axes)
    row = _row(tensors, [x.shape[axis] for axis in axes])
    full = [*row.shape, *rest] if _in_front(axes) else [*rest[: axes[0]], *row.shape, *rest[axes[0] :]]
    values = values.expand(full)
    if not _in_front(axes):
        values = values.permute(*_inverse(_back(values.dim(), axes[0], row.dim())))
    table = add_rows(table, row.reshape(-1), values.reshape(row.numel(), -1))
    sizes = [x.shape[axis] for axis in order]
    return table.view(sizes).permute(*_inverse(order))


def _table(x: Tensor, axes: list[int]) -> tuple[Tensor, list[int], list[int]]:
    """Return (x as [V, D] with a row per combination of the indexed ``axes``, sizes of other axes, order of all axes)."""
    others = [axis for axis in range(x.dim()) if axis not in axes]
    order = [*axes, *others]
    rows = 1
    for axis in axes:
        rows *= x.shape[axis]
    return x.permute(*order).reshape(rows, -1), [x.shape[axis] for axis in others], order


def _row(indices: list[Tensor], sizes: list[int]) -> Tensor:
    """Return the row number in the table of :func:`_table` for each entry of the broadcast indices, int64.

    ``sizes`` are the sizes of the indexed axes; negative positions count from their ends.
    """
    row = None
    for place, size in zip(indices, sizes, strict=True):
        wide = place.long()
        start = torch.where(wide < 0, wide + size, wide)
        row = start if row is None else row * size + start
    assert row is not None
    return row


def _in_front(axes: list[int]) -> bool:
    """Return True if the indexed axes come first in x[indices]: torch leaves them in place only if they are adjacent."""
    return axes[0] == 0 or axes[-1] - axes[0] != len(axes) - 1


def _back(rank: int, start: int, count: int) -> list[int]:
    """Return the order of axes that moves the first ``count`` axes behind the ``start`` axes that follow them."""
    return [*range(count, count + start), *range(count), *range(count + start, rank)]


def add_rows(table: Tensor, row: Tensor, values: Tensor) -> Tensor:
    """Return ``table`` after table[row[n]] += values[n] for each n; table [V, D], row int64 [N] in [0, V), values [N, D].

    Entries are added along one axis: along two, onnxruntime takes twice as long.
    """
    if table.shape[0] <= PRODUCT_ROWS and table.is_floating_point():
        chosen = torch.arange(table.shape[0]).unsqueeze(1) == row
        return table + chosen.to(table.dtype) @ values
    width = table.shape[1]
    place = row.unsqueeze(1) * width + torch.arange(width)
    return table.reshape(-1).scatter_add(0, place.reshape(-1), values.reshape(-1)).view(table.shape)


def index_add(x: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: float = 1) -> Tensor:
    """Return x with alpha * ``source`` added at positions ``index`` [N] of axis ``dim``."""
    source = source if alpha == 1 else source * alpha
    return index_put(x, [None] * (dim % x.dim()) + [index.reshape(-1)], source, True)


def first_entries(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Return the first ``shape[i]`` entries of x along each axis i."""
    return x[tuple(slice(size) for size in shape)]


def scatter(op: OpOverload) -> Callable[..., Tensor]:
    """Return the rule for ``op``, which writes or adds a source at positions: it drops source entries beyond those of
    ``index``.

    ONNX requires equal shapes. If they are equal already, the rule returns NotImplemented (the op is kept).
    """

    def rule(x: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
        if index.shape == source.shape:
            return DECLINED
        scattered: Tensor = op(x, dim, index, first_entries(source, index.shape))
        return scattered

    return rule


def scatter_reduce(
    x: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, *, include_self: bool = True
) -> Tensor:
    """Compute means of ``source`` at positions ``index`` along ``dim``, as sums divided by counts, because ONNX lacks
    means.

    x[p] takes part if ``include_self``, or if no entry has position p. For other reductions return NotImplemented (the
    op is kept).
    """
    if index.shape != source.shape:
        smaller = first_entries(source, index.shape)
        reduced: Tensor = _aten.scatter_reduce(x, dim, index, smaller, reduce, include_self=include_self)
        return reduced
    if reduce != "mean":
        return DECLINED
    met = torch.zeros(x.shape, dtype=x.dtype).scatter_add(dim, index, torch.ones(index.shape, dtype=x.dtype))
    if include_self:
        return x.scatter_add(dim, index, source) / (met + 1.0)
    start = torch.where(met > 0, torch.zeros((), dtype=x.dtype), x)
    return start.scatter_add(dim, index, source) / met.clamp_min(1.0)


def embedding_backward(
    grad: Tensor, indices: Tensor, rows: int, padding: int, scale_by_frequency: bool
) -> Tensor:
    """Compute dL/dw[v] = sum of dL/dy[n] over n with indices[n] = v and v != padding.

    If ``scale_by_frequency``, the sum is divided by the number of these n.
    """
    width = grad.shape[-1]
    row = indices.reshape(-1).long()
    values = grad.reshape(-1, width)
    if padding >= 0:
        values = torch.where((row == padding).unsqueeze(1), torch.zeros((), dtype=grad.dtype), values)
    total = add_rows(torch.zeros((rows, width), dtype=grad.dtype), row, values)
    if not scale_by_frequency:
        return total
    ones = torch.ones((row.numel(), 1), dtype=grad.dtype)
    return total / add_rows(torch.zeros((rows, 1), dtype=grad.dtype), row, ones).clamp_min(1.0)


def slice_backward(grad: Tensor, sizes: list[int], dim: int, start: int, end: int, step: int) -> Tensor:
    """Compute dL/dx of y = x[start:end:step] along ``dim``: dL/dy at the positions that were read, zeros elsewhere.

    ``sizes`` is the shape of x.
    """
    dim %= len(sizes)
    start, stop, step = slice(start, end, step).indices(sizes[dim])
    if step > 1:
        return slice_scatter(torch.zeros(sizes, dtype=grad.dtype), grad, dim, start, stop, step)
    pads = _pads(len(sizes), dim, start, sizes[dim] - start - grad.shape[dim])
    padded: Tensor = _aten.constant_pad_nd(grad, pads, 0.0)
    return padded


def select_backward(grad: Tensor, sizes: list[int], dim: int, index: int) -> Tensor:
    """Compute dL/dx of y = x[index] along ``dim``: dL/dy at ``index``, zeros elsewhere. ``sizes`` is the shape of x."""
    dim %= len(sizes)
    index %= sizes[dim]
    return slice_backward(grad.unsqueeze(dim), sizes, dim, index, index + 1, 1)


def slice_scatter(
    x: Tensor, source: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Tensor:
    """Return x with x[start:end:step] along ``dim`` replaced: joined from parts, or picked from [x, source] if step > 1."""
    dim %= x.dim()
    size = x.shape[dim]
    start, stop, step = slice(start, end, step).indices(size)
    if step > 1:
        place = torch.arange(size)
        behind = place - start
        new = (behind >= 0) & (place < stop) & (torch.remainder(behind, step) == 0)
        origin = torch.where(new, size + torch.div(behind, step, rounding_mode="trunc"), place)
        return torch.cat([x, source], dim).index_select(dim, origin)
    stop = start + source.shape[dim]
    parts = [x.narrow(dim, 0, start), source, x.narrow(dim, stop, size - stop)]
    parts = [part for part in parts if part.shape[dim]]
    return torch.cat(parts, dim) if len(parts) > 1 else parts[0] if parts else source


def select_scatter(x: Tensor, source: Tensor, dim: int, index: int) -> Tensor:
    """Return x with x[index] along ``dim`` replaced by ``source``."""
    index %= x.shape[dim]
    return slice_scatter(x, source.unsqueeze(dim), dim, index, index + 1)


def unfold_backward(grad: Tensor, sizes: list[int], dim: int, size: int, step: int) -> Tensor:
    """Compute dL/dx[q] = sum of dL/dy[.., w, .., k] over windows w and offsets k with w * step + k = q along ``dim``.

    ``sizes`` is the shape of x, ``size`` the length of a window.
    """
    dim %= len(sizes)
    windows = grad.movedim(-1, dim + 1).flatten(dim, dim + 1)  # [.., window and offset, ..]
    places = torch.arange(grad.shape[dim]).unsqueeze(1) * step + torch.arange(size)
    return index_add(torch.zeros(sizes, dtype=grad.dtype), dim, places, windows)


def _pads(rank: int, dim: int, before: int, behind: int) -> list[int]:
    """Return the argument of constant_pad_nd that pads axis ``dim`` of ``rank`` axes: pairs from the last axis on."""
    return [0, 0] * (rank - 1 - dim) + [before, behind]


def _inverse(order: list[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)


RULES: Rules = {
    _aten.embedding_dense_backward.default: embedding_backward,
    _aten.index_add.default: index_add,
    _aten.index.Tensor: index,
    _aten.index_put.default: index_put,
    **{op: scatter(op) for op in (_aten.scatter.src, _aten.scatter_add.default)},
    _aten.scatter_reduce.two: scatter_reduce,
    _aten.select_backward.default: select_backward,
    _aten.select_scatter.default: select_scatter,
    _aten.slice_backward.default: slice_backward,
    _aten.slice_scatter.default: slice_scatter,
    _aten.unfold_backward.default: unfold_backward,
}
