"""Operands of two types, a number as first operand, and selections between booleans."""

from __future__ import annotations

import torch
from torch import Tensor

from exporters.decompositions.division import operands
from exporters.decompositions.rule import DECLINED, Rules

_aten = torch.ops.aten


def subtract(x: Tensor | float, y: Tensor, *, alpha: float = 1) -> Tensor:
    """Return x - alpha y of a number x in the type of both: torch casts inside of the op, engines do not."""
    dtype = torch.result_type(x, y)
    if isinstance(x, Tensor) or y.dtype == dtype:
        return DECLINED
    return torch.sub(x, y.to(dtype), alpha=alpha)


def select(condition: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Return x where ``condition`` holds, else y. ONNX Runtime has no selection between booleans."""
    if x.dtype is not torch.bool or y.dtype is not torch.bool:
        return DECLINED
    return (condition & x) | (~condition & y)


def x_log_y(x: Tensor | float, y: Tensor | float) -> Tensor:
    """Return x log(y), and 0 where x is 0."""
    return torch.xlogy(*operands(x, y))


RULES: Rules = {
    _aten.sub.Tensor: subtract,
    _aten.where.self: select,
    _aten.xlogy.Scalar_Self: x_log_y,
    _aten.xlogy.Scalar_Other: x_log_y,
}
