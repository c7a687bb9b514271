"""Quotients of whole numbers for ExecuTorch, which has an exact kernel for those that are rounded down."""

from __future__ import annotations

import torch
from torch import Tensor

from exporters.decompositions import arithmetic as plain
from exporters.decompositions.arithmetic import Number, operands, rules_of
from exporters.decompositions.rule import DECLINED, Rules

_aten = torch.ops.aten


def floor_divide(x: Number, y: Number) -> Tensor:
    """Return floor(x / y)."""
    a, b = operands(x, y)
    if a.is_floating_point():
        return plain.floor_divide(a, b)
    return DECLINED if a is x and b is y else torch.floor_divide(a, b)


def divide(x: Number, y: Number, *, rounding_mode: str | None) -> Tensor:
    """Return x / y, rounded down ("floor") or towards zero ("trunc"). A quotient of different signs that is not whole is
    one more than its floor."""
    a, b = operands(x, y)
    if rounding_mode == "floor":
        return floor_divide(a, b) if a.is_floating_point() else torch.floor_divide(a, b)
    if rounding_mode is None or a.is_floating_point():
        return DECLINED
    quotient = torch.floor_divide(a, b)
    return quotient + ((quotient * b != a) & ((a < 0) != (b < 0))).to(a.dtype)


RULES: Rules = {
    **rules_of("floor_divide", floor_divide),
    _aten.div.Tensor_mode: divide,
    _aten.div.Scalar_mode: divide,
}
