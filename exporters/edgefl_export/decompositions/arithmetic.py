"""Remainders, rounded quotients and bit shifts, with torch's results for negative and for large numbers; operands of two
types, and selections between booleans.

Whole numbers stay whole: a quotient by floats is wrong from 2^24 on. Every rule ends at ``div`` with rounding mode
"trunc" on two tensors of one integer type, for which each runtime has an exact form.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from edgefl_export.operators import DECLINED, Rules

_aten = torch.ops.aten
Number = Tensor | float


def operands(x: Number, y: Number) -> tuple[Tensor, Tensor]:
    """Return (x, y) as tensors of the dtype that torch computes in."""
    dtype = torch.result_type(x, y)
    return _as_tensor(x, dtype), _as_tensor(y, dtype)


def _as_tensor(value: Number, dtype: torch.dtype) -> Tensor:
    return value.to(dtype) if isinstance(value, Tensor) else torch.full((), value, dtype=dtype)


def remainder(x: Number, y: Number) -> Tensor:
    """Compute x - floor(x / y) y, which has the sign of y.

    It is computed from fmod, which is exact for floats. floor(x / y) is not: a quotient just below an integer may be rounded
    up to it, and the remainder would be wrong by y.
    """
    a, b = operands(x, y)
    rest = torch.fmod(a, b)
    return torch.where((rest != 0) & ((rest < 0) != (b < 0)), rest + b, rest)


def fmod(x: Number, y: Number) -> Tensor:
    """Compute x - trunc(x / y) y, which has the sign of x, for integers; for floats return NotImplemented (the op is
    kept).
    """
    a, b = operands(x, y)
    return DECLINED if a.is_floating_point() else a - torch.div(a, b, rounding_mode="trunc") * b


def divide(x: Number, y: Number, *, rounding_mode: str | None) -> Tensor:
    """Compute x / y, rounded down ("floor"), or for integers of different types towards zero ("trunc"); otherwise
    return NotImplemented (the op is kept).
    """
    if rounding_mode == "floor":
        return floor_divide(x, y)
    a, b = operands(x, y)
    if rounding_mode is None or a.is_floating_point() or (a is x and b is y):
        return DECLINED
    return torch.div(a, b, rounding_mode="trunc")


def floor_divide(x: Number, y: Number) -> Tensor:
    """Compute floor(x / y). For floats it is (x - remainder) / y, as in torch, which is an integer but for rounding."""
    a, b = operands(x, y)
    if a.is_floating_point():
        return torch.where(b == 0, a / b, torch.round((a - torch.remainder(a, b)) / b))
    quotient = torch.div(a, b, rounding_mode="trunc")
    return quotient - ((quotient * b != a) & ((a < 0) != (b < 0))).to(a.dtype)


def left_shift(x: Number, bits: Number) -> Tensor:
    """Compute x 2^bits."""
    x, bits = operands(x, bits)
    return x * _power(bits)


def right_shift(x: Number, bits: Number) -> Tensor:
    """Compute floor(x / 2^bits); the sign bit is repeated from the left."""
    x, bits = operands(x, bits)
    return floor_divide(x, _power(bits))


def _power(bits: Tensor) -> Tensor:
    return torch.pow(torch.full((), 2, dtype=bits.dtype), bits)


def subtract(x: Number, y: Tensor, *, alpha: float = 1) -> Tensor:
    """Compute x - alpha y for a number x, in the common dtype: torch converts inside of the op, engines do not.

    If x is a tensor or y has that dtype, return NotImplemented (the op is kept).
    """
    dtype = torch.result_type(x, y)
    if isinstance(x, Tensor) or y.dtype == dtype:
        return DECLINED
    return torch.sub(x, y.to(dtype), alpha=alpha)


def x_log_y(x: Number, y: Number) -> Tensor:
    """Compute x log(y), and 0 where x is 0."""
    return torch.xlogy(*operands(x, y))


def select(condition: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Return x where ``condition`` holds, else y, for booleans, because ONNX Runtime has no selection between booleans.

    For other dtypes return NotImplemented (the op is kept).
    """
    if x.dtype is not torch.bool or y.dtype is not torch.bool:
        return DECLINED
    return (condition & x) | (~condition & y)


def rules_of(name: str, rule: Callable[..., object]) -> Rules:
    """Return a dictionary with ``rule`` for each overload of ``aten.<name>`` that takes two operands and writes to
    none of them.
    """
    packet = getattr(_aten, name)
    overloads = [getattr(packet, overload) for overload in packet.overloads()]
    return {op: rule for op in overloads if len(op._schema.arguments) == 2 and not op._schema.is_mutable}


# Products: few rows with a transposed weight, and products of more than two tensors.

# Up to this many rows, the weight's own layout decides how fast a product is.
FEW_ROWS = 64


def mm(a: Tensor, b: Tensor) -> Tensor:
    """Compute a b as (b^T a^T)^T if b is a transposed weight and a has few rows; otherwise return NotImplemented (the
    op is kept).

    Runtimes repack the right factor: a dense layer of 3136 x 2048 takes 4.0 ms instead of 5.8 for 32 rows.
    """
    if not _few_rows_by_weight(a, b):
        return DECLINED
    return (b.t() @ a.t()).t()


def addmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """Compute bias + a b with the product as in :func:`mm`.

    Return NotImplemented (the op is kept) where :func:`mm` does, and for other factors than 1.
    """
    if not _few_rows_by_weight(a, b) or beta != 1 or alpha != 1:
        return DECLINED
    return mm(a, b) + bias


def _few_rows_by_weight(a: Tensor, b: Tensor) -> bool:
    transposed = b.stride(0) == 1 and b.stride(1) > 1
    return transposed and a.shape[0] <= FEW_ROWS and b.shape[1] >= 4 * a.shape[0]


def trilinear(
    a: Tensor,
    b: Tensor,
    c: Tensor,
    expand_a: list[int],
    expand_b: list[int],
    expand_c: list[int],
    sum_dims: list[int],
    unroll_dim: int = 1,
) -> Tensor:
    """Compute the sum over ``sum_dims`` of a * b * c, after inserting the listed axes of length one into each.

    ``unroll_dim`` is ignored; it does not change the result.
    """
    product = _insert_axes(a, expand_a) * _insert_axes(b, expand_b) * _insert_axes(c, expand_c)
    return product.sum(sum_dims) if sum_dims else product


def _insert_axes(x: Tensor, axes: list[int]) -> Tensor:
    for axis in axes:
        x = x.unsqueeze(axis)
    return x


# Reductions, sorted order, medians and running log-sums.

# Reductions that return more than one tensor, and those of booleans.


def var_mean(
    x: Tensor, dim: list[int] | None = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    """Compute (variance, mean) over ``dim``: (sum (x - m)^2 / (n - correction), m), where m is the mean of n entries."""
    axes = list(dim) if dim else list(range(x.dim()))
    mean = x.mean(axes, keepdim=True)
    centred = x - mean
    count = x.numel() // max(mean.numel(), 1)
    total = (centred * centred).sum(axes, keepdim=keepdim)
    spread = total / (count - (1.0 if correction is None else correction))
    return spread, mean if keepdim else mean.reshape(spread.shape)


def extreme(op: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the rule for ``op``, the maximum or minimum over the axes ``dim``.

    The rule lists all axes if ``dim`` is empty, as ONNX needs them, and computes booleans as integers. In other cases it
    returns NotImplemented (the op is kept).
    """

    def rule(x: Tensor, dim: Sequence[int] = (), keepdim: bool = False) -> Tensor:
        axes = list(dim) or list(range(x.dim()))
        if x.dtype == torch.bool:
            return op(x.to(torch.int32), axes, keepdim).bool()
        return DECLINED if dim or not axes else op(x, axes, keepdim)

    return rule


def of_booleans(op: Callable[..., Any]) -> Callable[..., Any]:
    """Return the rule for maxima or minima of booleans, computed as numbers, with their positions.

    ONNX compares no booleans before opset 20. For other dtypes the rule returns NotImplemented (the op is kept).
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
    """Return (entries along ``dim`` in order, their positions); the order of equal entries is kept."""
    return torch.sort(x, dim, descending)


_NARROW = (torch.bool, torch.uint8, torch.int8, torch.int16)


def sort(x: Tensor, dim: int = -1, descending: bool = False) -> tuple[Tensor, Tensor]:
    """Return (booleans or narrow integers in order, their positions), computed in a wider type that engines can sort.

    For other dtypes return NotImplemented (the op is kept).
    """
    if x.dtype not in _NARROW:
        return DECLINED
    values, places = torch.sort(x.to(torch.int32), dim, descending)
    return values.to(x.dtype), places


def kthvalue(x: Tensor, k: int, dim: int = -1, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """Return (k-th smallest entry along ``dim``, its position); k counts from 1."""
    if not x.dim():
        return x.clone(), torch.zeros((), dtype=torch.int64)
    values, places = torch.sort(x, dim)
    value, place = values.narrow(dim, k - 1, 1), places.narrow(dim, k - 1, 1)
    return (value, place) if keepdim else (value.squeeze(dim), place.squeeze(dim))


def median_along(x: Tensor, dim: int = -1, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """Return (lower median along ``dim``, its position)."""
    return kthvalue(x, (x.shape[dim] + 1) // 2 if x.dim() else 1, dim, keepdim)


def median(x: Tensor) -> Tensor:
    """Return the lower median of all entries."""
    return median_along(x.reshape(-1), 0)[0]


def logcumsumexp(x: Tensor, dim: int) -> Tensor:
    """Compute log(exp(x_0) + ... + exp(x_k)) along ``dim`` for floats; for integers return NotImplemented (the op is
    kept).

    Sums over 1, 2, 4, ... entries are built from two shorter ones, each relative to the larger one, so no exponential
    overflows.
    """
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
    **rules_of("remainder", remainder),
    **rules_of("fmod", fmod),
    **rules_of("floor_divide", floor_divide),
    **rules_of("__lshift__", left_shift),
    **rules_of("__rshift__", right_shift),
    **rules_of("bitwise_left_shift", left_shift),
    **rules_of("bitwise_right_shift", right_shift),
    _aten.div.Tensor_mode: divide,
    _aten.div.Scalar_mode: divide,
    _aten.sub.Tensor: subtract,
    _aten.where.self: select,
    _aten.xlogy.Scalar_Self: x_log_y,
    _aten.xlogy.Scalar_Other: x_log_y,
    _aten._trilinear.default: trilinear,
    _aten.addmm.default: addmm,
    _aten.mm.default: mm,
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
