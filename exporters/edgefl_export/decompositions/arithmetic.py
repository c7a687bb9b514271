"""Remainders, rounded quotients and bit shifts, with torch's results for negative and for large numbers; operands of two
types, and selections between booleans.

Whole numbers stay whole: a quotient by floats is wrong from 2^24 on. Every rule ends at ``div`` with rounding mode
"trunc" on two tensors of one integer type, for which each runtime has an exact form.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from edgefl_export.decompositions.rule import DECLINED, Rules

_aten = torch.ops.aten
Number = Tensor | float


def operands(x: Number, y: Number) -> tuple[Tensor, Tensor]:
    """Return both operands as tensors of the type that torch computes in."""
    dtype = torch.result_type(x, y)
    return _as_tensor(x, dtype), _as_tensor(y, dtype)


def _as_tensor(value: Number, dtype: torch.dtype) -> Tensor:
    return value.to(dtype) if isinstance(value, Tensor) else torch.full((), value, dtype=dtype)


def remainder(x: Number, y: Number) -> Tensor:
    """Return x - floor(x / y) y, which has the sign of y.

    fmod is exact for floats. floor(x / y) is not: a quotient just below a whole number is rounded up to it, and the
    remainder would be off by y.
    """
    a, b = operands(x, y)
    rest = torch.fmod(a, b)
    return torch.where((rest != 0) & ((rest < 0) != (b < 0)), rest + b, rest)


def fmod(x: Number, y: Number) -> Tensor:
    """Return x - trunc(x / y) y, which has the sign of x."""
    a, b = operands(x, y)
    return DECLINED if a.is_floating_point() else a - torch.div(a, b, rounding_mode="trunc") * b


def divide(x: Number, y: Number, *, rounding_mode: str | None) -> Tensor:
    """Return x / y, rounded down ("floor") or towards zero ("trunc")."""
    if rounding_mode == "floor":
        return floor_divide(x, y)
    a, b = operands(x, y)
    if rounding_mode is None or a.is_floating_point() or (a is x and b is y):
        return DECLINED
    return torch.div(a, b, rounding_mode="trunc")


def floor_divide(x: Number, y: Number) -> Tensor:
    """Return floor(x / y). Of floats by the remainder, as torch does: (x - remainder) / y is whole but for rounding."""
    a, b = operands(x, y)
    if a.is_floating_point():
        return torch.where(b == 0, a / b, torch.round((a - torch.remainder(a, b)) / b))
    quotient = torch.div(a, b, rounding_mode="trunc")
    return quotient - ((quotient * b != a) & ((a < 0) != (b < 0))).to(a.dtype)


def left_shift(x: Number, bits: Number) -> Tensor:
    """Return x 2^bits."""
    x, bits = operands(x, bits)
    return x * _power(bits)


def right_shift(x: Number, bits: Number) -> Tensor:
    """Return floor(x / 2^bits), with the sign bit moving in from the left."""
    x, bits = operands(x, bits)
    return floor_divide(x, _power(bits))


def _power(bits: Tensor) -> Tensor:
    return torch.pow(torch.full((), 2, dtype=bits.dtype), bits)


def subtract(x: Number, y: Tensor, *, alpha: float = 1) -> Tensor:
    """Return x - alpha y of a number x in the type of both: torch casts inside of the op, engines do not."""
    dtype = torch.result_type(x, y)
    if isinstance(x, Tensor) or y.dtype == dtype:
        return DECLINED
    return torch.sub(x, y.to(dtype), alpha=alpha)


def x_log_y(x: Number, y: Number) -> Tensor:
    """Return x log(y), and 0 where x is 0."""
    return torch.xlogy(*operands(x, y))


def select(condition: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Return x where ``condition`` holds, else y. ONNX Runtime has no selection between booleans."""
    if x.dtype is not torch.bool or y.dtype is not torch.bool:
        return DECLINED
    return (condition & x) | (~condition & y)


def rules_of(name: str, rule: Callable[..., object]) -> Rules:
    """Return ``rule`` for each overload of ``aten.<name>`` that takes two operands and writes to neither."""
    packet = getattr(_aten, name)
    overloads = [getattr(packet, overload) for overload in packet.overloads()]
    return {op: rule for op in overloads if len(op._schema.arguments) == 2 and not op._schema.is_mutable}


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
}
