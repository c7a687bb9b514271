"""Layout: transposes, squeezes, views and in-place writes in the form that ONNX takes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from edgefl_export.decompositions.indexing import slice_scatter
from edgefl_export.operators import DECLINED, Rules, aten_ops

_aten = torch.ops.aten

# Layout: transposes and squeezes in the form ONNX takes them, and what in-place writes become.


def squeeze_dims(x: Tensor, dims: list[int]) -> Tensor:
    """Remove those of the axes ``dims`` that have length one."""
    drop = {dim % x.dim() for dim in dims if x.shape[dim] == 1}
    return x.view([size for axis, size in enumerate(x.shape) if axis not in drop])


def transpose_matrix(x: Tensor) -> Tensor:
    """Compute ``x.t()`` as a permutation (ONNX Transpose); a vector is returned unchanged."""
    return x.permute(1, 0) if x.dim() == 2 else x


def copy(destination: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """Return the result of ``destination.copy_(source)``: the source in the shape and dtype of the destination."""
    source = source.to(destination.dtype)
    return source if source.shape == destination.shape else source.expand(destination.shape)


def fill(destination: Tensor, value: float) -> Tensor:
    """Return the result of ``destination.fill_(value)``. The destination, often an empty tensor, is not read."""
    return torch.full(destination.shape, value, dtype=destination.dtype)


def split_with_sizes(x: Tensor, sizes: list[int], dim: int = 0) -> list[Tensor]:
    """Return consecutive parts with these ``sizes`` along ``dim``, as slices.

    torch.onnx makes a sequence of them, which few runtimes handle well.
    """
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    return [
        _aten.slice.Tensor(x, dim, start, start + size) for start, size in zip(starts, sizes, strict=True)
    ]


def split(x: Tensor, size: int, dim: int = 0) -> list[Tensor]:
    """Return parts of ``size`` along ``dim``; the last one may be shorter."""
    length = x.shape[dim]
    return split_with_sizes(x, [min(size, length - start) for start in range(0, length, size)], dim)


# Views: what the first pass could view in place, in the memory layout that the second pass gives it.


def view(x: Tensor, size: list[int]) -> Tensor:
    """Return a view of a contiguous copy of ``x``; if ``x`` is contiguous, return NotImplemented (the op is kept).

    The result of a rule may have other strides than that of the op (a channels-last convolution becomes matrix
    products), so that a recorded view no longer fits. ONNX knows no strides, so the copy costs nothing there.
    """
    return DECLINED if x.is_contiguous() else x.contiguous().view(size)


# Padding with a tensor's own values, in one to three dimensions: forwards stay (ONNX Pad), gradients fold back.
#
# Each gradient goes one axis after the other: what was copied from an entry is added to it.


def replication_pad_backward(grad: Tensor, x: Tensor, padding: list[int]) -> Tensor:
    """Compute dL/dx[i] = sum of dL/dy[j] over all j with clamp(j - left, 0, n - 1) = i; only borders have several such j."""
    return _each_axis(grad, x, padding, _fold_border)


def reflection_pad_backward(grad: Tensor, x: Tensor, padding: list[int]) -> Tensor:
    """Compute dL/dx[i] = dL/dy[left + i], plus dL/dy[left - i] for 1 <= i <= left, and the same at the other end."""
    return _each_axis(grad, x, padding, _fold_mirror)


def _each_axis(
    grad: Tensor, x: Tensor, padding: list[int], fold: Callable[[Tensor, int, int, int, int], Tensor]
) -> Tensor:
    if min(padding) < 0:
        return DECLINED
    for index in range(len(padding) // 2):
        left, right = padding[2 * index : 2 * index + 2]
        axis = grad.dim() - 1 - index
        if left or right:
            grad = fold(grad, axis, x.shape[axis], left, right)
    return grad


def _fold_border(grad: Tensor, axis: int, size: int, left: int, right: int) -> Tensor:
    if size == 1:
        return grad.sum(axis, keepdim=True)
    first = grad.narrow(axis, 0, left + 1).sum(axis, keepdim=True)
    middle = grad.narrow(axis, left + 1, size - 2)
    last = grad.narrow(axis, left + size - 1, right + 1).sum(axis, keepdim=True)
    return torch.cat([first, middle, last], axis)


def _fold_mirror(grad: Tensor, axis: int, size: int, left: int, right: int) -> Tensor:
    behind = grad.dim() - 1 - axis
    total = grad.narrow(axis, left, size)
    if left:
        mirrored = grad.narrow(axis, 0, left).flip(axis)  # of entries 1 .. left
        total = total + _aten.constant_pad_nd(mirrored, [0, 0] * behind + [1, size - 1 - left], 0.0)
    if right:
        mirrored = grad.narrow(axis, left + size, right).flip(axis)  # of entries size - 1 - right .. size - 2
        total = total + _aten.constant_pad_nd(mirrored, [0, 0] * behind + [size - 1 - right, 1], 0.0)
    return total


def _keep_op(x: Tensor, padding: list[int]) -> Tensor:
    """Return NotImplemented, which keeps the padding op: ONNX has a better form of it than PyTorch's decomposition."""
    return DECLINED


# Diagonals and strided views: what was written through one becomes a new tensor.

# An axis of a tensor with the (start, stop, step) that a view takes of it.
Cut = tuple[int, tuple[int, int, int]]


def diagonal_backward(grad: Tensor, sizes: list[int], offset: int, dim1: int, dim2: int) -> Tensor:
    """Compute dL/dx[.., a, b, ..] = dL/dy[.., l] where (a, b) is the l-th position of the diagonal, else 0.

    ``sizes`` is the shape of x, ``dim1`` and ``dim2`` the axes of a and b; the diagonal has b = a + ``offset``.
    """
    mask, spread = _on_diagonal(grad, list(sizes), offset, dim1, dim2)
    return torch.where(mask, spread, torch.zeros((), dtype=grad.dtype))


def diagonal_scatter(x: Tensor, source: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    """Return x with the diagonal b = a + ``offset`` of its axes ``dim1`` (a) and ``dim2`` (b) replaced by ``source``."""
    mask, spread = _on_diagonal(source, list(x.shape), offset, dim1, dim2)
    return torch.where(mask, spread, x)


def _on_diagonal(
    values: Tensor, sizes: list[int], offset: int, dim1: int, dim2: int
) -> tuple[Tensor, Tensor]:
    """Return (mask of the diagonal, ``values`` [.., l] spread along rows or columns); both broadcast to ``sizes``."""
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
    """Return the entries of contiguous x at flat positions offset + sum_i k_i stride_i, by slices if possible.

    If x is not contiguous, or a position is beyond x, return NotImplemented (the op is kept).
    """
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
    """Return contiguous x with the entries that :func:`as_strided` reads replaced by ``source``; return NotImplemented
    (the op is kept) in the same cases.
    """
    start = _start(x, size, stride, offset)
    if start is None:
        return DECLINED
    cuts = _cuts(x, size, stride, start)
    if cuts is None:
        return x.reshape(-1).scatter(0, _flat(size, stride, start), source.reshape(-1)).view(x.shape)
    return _put(x, source, cuts)


def _start(x: Tensor, size: list[int], stride: list[int], offset: int | None) -> int | None:
    """Return the flat position in x at which a view with these sizes, strides and offset begins.

    Return None if the view reads memory in another order than x has, or beyond x. Its base is not considered, because a
    rule may lay a tensor out in another way than its op.
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
    """Return the slices of the axes of x that a view selects, or None if the view is not a product of slices in order."""
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
    """Return the flat positions [entries] of the entries of a view, in order."""
    places = torch.full((1,), offset)
    for length, step in zip(size, stride, strict=True):
        places = (places.unsqueeze(1) + torch.arange(length) * step).reshape(-1)
    return places


RULES: Rules = {
    _aten.copy.default: copy,
    _aten.fill.Scalar: fill,
    _aten.split.Tensor: split,
    _aten.split_with_sizes.default: split_with_sizes,
    _aten.squeeze.dims: squeeze_dims,
    _aten.t.default: transpose_matrix,
    _aten.view.default: view,
    **dict.fromkeys(aten_ops("reflection_pad1d reflection_pad2d reflection_pad3d"), _keep_op),
    **dict.fromkeys(aten_ops("replication_pad1d replication_pad2d replication_pad3d"), _keep_op),
    **dict.fromkeys(
        aten_ops("reflection_pad1d_backward reflection_pad2d_backward reflection_pad3d_backward"),
        reflection_pad_backward,
    ),
    **dict.fromkeys(
        aten_ops("replication_pad1d_backward replication_pad2d_backward replication_pad3d_backward"),
        replication_pad_backward,
    ),
    _aten.as_strided.default: as_strided,
    _aten.as_strided_scatter.default: as_strided_scatter,
    _aten.diagonal_backward.default: diagonal_backward,
    _aten.diagonal_scatter.default: diagonal_scatter,
}
