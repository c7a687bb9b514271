"""Reductions, sorted order, medians and running log-sums."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from edgefl_export.decompositions.rule import DECLINED, Rules

_aten = torch.ops.aten

# Reductions that return more than one tensor, and those of booleans.


def var_mean(
    x: Tensor, dim: list[int] | None = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    """(sum (x - m)^2 / (n - correction), m) with m the mean over ``dim`` and n the number of entries it covers."""
    axes = list(dim) if dim else list(range(x.dim()))
    mean = x.mean(axes, keepdim=True)
    centred = x - mean
    count = x.numel() // max(mean.numel(), 1)
    total = (centred * centred).sum(axes, keepdim=keepdim)
    spread = total / (count - (1.0 if correction is None else correction))
    return spread, mean if keepdim else mean.reshape(spread.shape)


def extreme(op: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the rule for the largest or smallest over ``dim``. No axis means all of them, which ONNX must be given."""

    def rule(x: Tensor, dim: Sequence[int] = (), keepdim: bool = False) -> Tensor:
        axes = list(dim) or list(range(x.dim()))
        if x.dtype == torch.bool:
            return op(x.to(torch.int32), axes, keepdim).bool()
        return DECLINED if dim or not axes else op(x, axes, keepdim)

    return rule


def of_booleans(op: Callable[..., Any]) -> Callable[..., Any]:
    """Return the rule for extremes of booleans, computed as numbers, with their positions.

    ONNX compares no booleans before opset 20. Other types stay as they are.
    """

    def rule(x: Tensor, *arguments: Any, **options: Any) -> Any:
        if x.dtype != torch.bool:
            return DECLINED
        values, positions = op(x.to(torch.int32), *arguments, **options)
        return values.bool(), positions

    return rule


# Sorted order, medians and running log-sums.
#
# Torch's sort on a processor is always stable, and so is ONNX's TopK for a whole axis.

# Minus infinity takes part in a sum of exponentials, and its difference with itself is NaN.
_LOWEST, _HIGHEST = -1e38, 1e38


def stable_sort(
    x: Tensor, *, stable: bool | None, dim: int = -1, descending: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the entries along ``dim`` in order, and their positions."""
    return torch.sort(x, dim, descending)


_NARROW = (torch.bool, torch.uint8, torch.int8, torch.int16)


def sort(x: Tensor, dim: int = -1, descending: bool = False) -> tuple[Tensor, Tensor]:
    """Return booleans and narrow integers in order, and their positions: engines order wider types alone."""
    if x.dtype not in _NARROW:
        return DECLINED
    values, places = torch.sort(x.to(torch.int32), dim, descending)
    return values.to(x.dtype), places


def kthvalue(x: Tensor, k: int, dim: int = -1, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """Return the k-th smallest entry along ``dim``, counted from 1, and its position."""
    if not x.dim():
        return x.clone(), torch.zeros((), dtype=torch.int64)
    values, places = torch.sort(x, dim)
    value, place = values.narrow(dim, k - 1, 1), places.narrow(dim, k - 1, 1)
    return (value, place) if keepdim else (value.squeeze(dim), place.squeeze(dim))


def median_along(x: Tensor, dim: int = -1, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """Return the lower median along ``dim``, and its position."""
    return kthvalue(x, (x.shape[dim] + 1) // 2 if x.dim() else 1, dim, keepdim)


def median(x: Tensor) -> Tensor:
    """Return the lower median of all entries."""
    return median_along(x.reshape(-1), 0)[0]


def logcumsumexp(x: Tensor, dim: int) -> Tensor:
    """Return log(exp(x_0) + ... + exp(x_k)) along ``dim``: sums over 1, 2, 4, ... entries, so that each sum of two starts
    from the larger one and no exponential overflows."""
    if not x.dim():
        return x.clone()
    if not x.is_floating_point():
        return DECLINED
    length, shift = x.shape[dim], 1
    while shift < length:
        head = x.narrow(dim, 0, shift)
        later, earlier = x.narrow(dim, shift, length - shift), x.narrow(dim, 0, length - shift)
        x = torch.cat((head, _log_of_sum(later, earlier)), dim)
        shift *= 2
    return x


def _log_of_sum(x: Tensor, y: Tensor) -> Tensor:
    larger, smaller = torch.maximum(x, y), torch.minimum(x, y)
    return larger + (smaller - larger.clamp(_LOWEST, _HIGHEST)).exp().log1p()


RULES: Rules = {
    _aten.var_mean.correction: var_mean,
    **{op: extreme(op) for op in (_aten.amax.default, _aten.amin.default)},
    **{op: of_booleans(op) for op in (_aten.max.dim, _aten.min.dim)},
    _aten.sort.default: sort,
    _aten.sort.stable: stable_sort,
    _aten.kthvalue.default: kthvalue,
    _aten.median.dim: median_along,
    _aten.median.default: median,
    _aten.logcumsumexp.default: logcumsumexp,
}
