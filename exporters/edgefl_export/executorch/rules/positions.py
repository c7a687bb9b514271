"""Sorting, picking, padding, resizing and strided views in ops that ExecuTorch runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from edgefl_export.decompositions import arithmetic, indexing, layout
from edgefl_export.decompositions.resize import KEYS, LINEAR
from edgefl_export.operators import DECLINED, Rules, aten_ops

_aten = torch.ops.aten

# Sorted order for ExecuTorch, which has the best entries of an axis and leaves equal ones in any order.


def sort(x: Tensor, dim: int = -1, descending: bool = False) -> tuple[Tensor, Tensor]:
    """Return (entries along ``dim`` in order, their positions); positions of equal entries ascend, as in torch.

    A second sort, of integers without equal ones, orders the positions within each run of equal entries. For a single
    number or an empty axis return NotImplemented (the op is kept).
    """
    if not x.dim() or not x.shape[dim]:
        return DECLINED
    if (narrow := arithmetic.sort(x, dim, descending)) is not NotImplemented:
        return narrow
    size = x.shape[dim]
    values, places = torch.topk(x, size, dim, descending, True)
    if size == 1:
        return values, places
    starts = values.narrow(dim, 1, size - 1) != values.narrow(dim, 0, size - 1)
    first = torch.zeros_like(places.narrow(dim, 0, 1))
    runs = torch.cat((first, starts.to(torch.int64).cumsum(dim)), dim) * size
    ordered = torch.topk(runs + places, size, dim, False, True)[0]
    return values, ordered - runs


# Picking by positions: ExecuTorch's kernel does not count from the end.


def index(x: Tensor, indices: list[Tensor | None]) -> Tensor:
    """Return x[indices], where None selects a whole axis; negative positions count from the end."""
    return indexing.index(x, [_from_the_start(each, x.shape[axis]) for axis, each in enumerate(indices)])


def _from_the_start(places: Tensor | None, size: int) -> Tensor | None:
    if places is None or places.dtype == torch.bool:
        return places
    wide = places.long()
    return torch.where(wide < 0, wide + size, wide)


# Scattering: ExecuTorch has the kernel that adds alone.


def scatter_reduce(
    x: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, *, include_self: bool = True
) -> Tensor:
    """Return x with the entries of ``source`` reduced into the positions ``index`` along ``dim``.

    ``reduce`` is a sum, product, maximum or minimum. x[p] takes part if ``include_self``, or if no entry has position p. All
    entries are compared with all positions, so many entries need a large tensor.
    """
    if reduce == "mean" or not x.dim():
        return indexing.scatter_reduce(x, dim, index, source, reduce, include_self=include_self)
    size, old = x.shape[dim], x.movedim(dim, -1)
    source = indexing.first_entries(source, index.shape).movedim(dim, -1)
    index = index.movedim(dim, -1)
    missing = [mine - theirs for mine, theirs in zip(old.shape[:-1], index.shape[:-1], strict=True)]
    if any(missing):  # rows of x without an index: one that is no place
        amounts = [0, 0, *(amount for length in reversed(missing) for amount in (0, length))]
        index, source = F.pad(index, amounts, value=size), F.pad(source, amounts)
    hits = index.unsqueeze(-1) == torch.arange(size)
    nothing, total = _REDUCTIONS[reduce]
    start = torch.full((), nothing(x.dtype), dtype=x.dtype)
    made = total(torch.where(hits, source.unsqueeze(-1), start), -2)
    is_met = hits.to(torch.int32).amax(-2) > 0
    made = total(torch.stack((old, made)), 0) if include_self else torch.where(is_met, made, old)
    return made.movedim(-1, dim)


def _lowest(dtype: torch.dtype) -> float:
    return -math.inf if dtype.is_floating_point else torch.iinfo(dtype).min


def _highest(dtype: torch.dtype) -> float:
    return math.inf if dtype.is_floating_point else torch.iinfo(dtype).max


_REDUCTIONS: dict[str, tuple[Callable[[torch.dtype], float], Callable[[Tensor, int], Tensor]]] = {
    "sum": (lambda _: 0, lambda x, dim: x.sum(dim, dtype=x.dtype)),
    "prod": (lambda _: 1, lambda x, dim: x.prod(dim, dtype=x.dtype)),
    "amax": (_lowest, torch.amax),
    "amin": (_highest, torch.amin),
}


# Padding: ExecuTorch's kernel takes no negative amounts, which crop.


def constant_pad(x: Tensor, amounts: Sequence[int], value: float = 0.0) -> Tensor:
    """Crop x by the negative amounts, then pad it with ``value`` by the others; two amounts an axis, last axis first.

    Without negative amounts return NotImplemented (the op is kept).
    """
    if min(amounts, default=0) >= 0:
        return DECLINED
    for number, (before, after) in enumerate(zip(amounts[::2], amounts[1::2], strict=True)):
        axis = x.dim() - 1 - number
        first, last = max(-before, 0), x.shape[axis] - max(-after, 0)
        x = x.narrow(axis, first, last - first)
    padded: Tensor = _aten.constant_pad_nd(x, [max(amount, 0) for amount in amounts], value)
    return padded


# Strided views of tensors that a rule has laid out channels last: as they lay before, row by row.


def as_strided(x: Tensor, size: list[int], stride: list[int], offset: int | None = None) -> Tensor:
    """Return the entries at flat positions offset + sum_i k_i stride_i of x in row order."""
    return layout.as_strided(x.contiguous(), size, stride, offset)


def as_strided_scatter(
    x: Tensor, source: Tensor, size: list[int], stride: list[int], offset: int | None = None
) -> Tensor:
    """Return x with the entries that :func:`as_strided` reads replaced by ``source``."""
    return layout.as_strided_scatter(x.contiguous(), source, size, stride, offset)


RULES: Rules = {
    _aten.scatter_reduce.two: scatter_reduce,
    _aten.sort.default: sort,
    _aten.index.Tensor: index,
    _aten.constant_pad_nd.default: constant_pad,
    **dict.fromkeys(aten_ops("upsample_linear1d upsample_bilinear2d upsample_trilinear3d"), LINEAR.product),
    _aten.upsample_bicubic2d.default: KEYS.product,
    _aten.as_strided.default: as_strided,
    _aten.as_strided_scatter.default: as_strided_scatter,
}
