"""Diagonals and strided views: what was written through one becomes a new tensor."""

from __future__ import annotations

import torch
from torch import Tensor

from edgefl_export.decompositions.indexing import slice_scatter
from edgefl_export.decompositions.rule import DECLINED, Rules

_aten = torch.ops.aten

# An axis of a tensor with the (start, stop, step) that a view takes of it.
Cut = tuple[int, tuple[int, int, int]]


def diagonal_backward(grad: Tensor, sizes: list[int], offset: int, dim1: int, dim2: int) -> Tensor:
    """dL/dx[.., a, b, ..] = dL/dy[.., l] where (a, b) is the l-th place of the diagonal, else 0."""
    mask, spread = _on_diagonal(grad, list(sizes), offset, dim1, dim2)
    return torch.where(mask, spread, torch.zeros((), dtype=grad.dtype))


def diagonal_scatter(x: Tensor, source: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    """x with a diagonal of its axes ``dim1`` and ``dim2`` replaced."""
    mask, spread = _on_diagonal(source, list(x.shape), offset, dim1, dim2)
    return torch.where(mask, spread, x)


def _on_diagonal(
    values: Tensor, sizes: list[int], offset: int, dim1: int, dim2: int
) -> tuple[Tensor, Tensor]:
    """Mask of the diagonal, and the values [.., l] spread along rows or columns; both broadcast to ``sizes``."""
    rank = len(sizes)
    dim1, dim2 = dim1 % rank, dim2 % rank
    rows, columns = sizes[dim1], sizes[dim2]
    mask = torch.arange(rows).unsqueeze(1) + offset == torch.arange(columns)
    length = values.shape[-1]
    if offset >= 0:  # l counts rows
        spread = _aten.constant_pad_nd(values, [0, rows - length], 0.0).unsqueeze(-1)
    else:
        spread = _aten.constant_pad_nd(values, [0, columns - length], 0.0).unsqueeze(-2)
    shape = [1] * rank
    shape[dim1], shape[dim2] = rows, columns
    ordered = mask if dim1 < dim2 else mask.t()
    return ordered.reshape(shape), spread.movedim((-2, -1), (dim1, dim2))


def as_strided(x: Tensor, size: list[int], stride: list[int], offset: int | None = None) -> Tensor:
    """Entries of contiguous x at flat positions offset + sum_i k_i stride_i; slices where that says the same."""
    start = _start(x, size, stride, offset)
    if start is None:
        return DECLINED
    cuts = _cuts(x, size, stride, start)
    if cuts is None:
        return x.reshape(-1).index_select(0, _flat(size, stride, start)).view(size)
    for dim, (first, stop, step) in cuts:
        x = _aten.slice.Tensor(x, dim, first, stop, step)
    return x.reshape(size)


def as_strided_scatter(
    x: Tensor, source: Tensor, size: list[int], stride: list[int], offset: int | None = None
) -> Tensor:
    """Contiguous x with what :func:`as_strided` reads replaced by ``source``."""
    start = _start(x, size, stride, offset)
    if start is None:
        return DECLINED
    cuts = _cuts(x, size, stride, start)
    if cuts is None:
        return x.reshape(-1).scatter(0, _flat(size, stride, start), source.reshape(-1)).view(x.shape)
    return _put(x, source, cuts)


def _start(x: Tensor, size: list[int], stride: list[int], offset: int | None) -> int | None:
    """Return the begin of a view in x; None if it reads memory in another order than x has, or beyond x.

    Memory is not followed further: rules may lay a tensor out in another way than their op.
    """
    start = 0 if offset is None else offset - int(x.storage_offset())
    reach = sum((length - 1) * step for length, step in zip(size, stride, strict=True))
    return start if x.is_contiguous() and start >= 0 and start + reach < x.numel() else None


def _put(x: Tensor, source: Tensor, cuts: list[Cut]) -> Tensor:
    if not cuts:
        return source.reshape(x.shape)
    dim, (start, stop, step) = cuts[0]
    part = _put(_aten.slice.Tensor(x, dim, start, stop, step), source, cuts[1:])
    return slice_scatter(x, part, dim, start, stop, step)


def _cuts(x: Tensor, size: list[int], stride: list[int], offset: int) -> list[Cut] | None:
    """The axes that a view cuts; None if the view is no product of slices, axes in order."""
    view = [(length, step) for length, step in zip(size, stride, strict=True) if length > 1]
    cuts = []
    for dim in range(x.dim()):
        unit = x.shape[dim + 1 :].numel()
        start, offset = divmod(offset, unit)
        length, step = 1, 1
        if view and x.shape[dim] > 1 and view[0][1] % unit == 0 and view[0][1] // unit < x.shape[dim]:
            length, step = view[0][0], view[0][1] // unit
            view = view[1:]
        stop = start + (length - 1) * step + 1
        if step < 1 or stop > x.shape[dim]:
            return None
        if (start, length) != (0, x.shape[dim]):
            cuts.append((dim, (start, stop, step)))
    return None if view or offset else cuts


def _flat(size: list[int], stride: list[int], offset: int) -> Tensor:
    """[entries] flat positions of a view's entries, in order."""
    places = torch.full((1,), offset)
    for length, step in zip(size, stride, strict=True):
        places = (places.unsqueeze(1) + torch.arange(length) * step).reshape(-1)
    return places


RULES: Rules = {
    _aten.as_strided.default: as_strided,
    _aten.as_strided_scatter.default: as_strided_scatter,
    _aten.diagonal_backward.default: diagonal_backward,
    _aten.diagonal_scatter.default: diagonal_scatter,
}
