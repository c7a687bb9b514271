"""Reductions that return more than one tensor, and those of booleans."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from exporters.decompositions.rule import DECLINED, Rules

_aten = torch.ops.aten


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
    """The largest or smallest over ``dim``: no axis means all of them, which ONNX's form has to be told."""

    def rule(x: Tensor, dim: Sequence[int] = (), keepdim: bool = False) -> Tensor:
        axes = list(dim) or list(range(x.dim()))
        if x.dtype == torch.bool:
            return op(x.to(torch.int32), axes, keepdim).bool()
        return DECLINED if dim or not axes else op(x, axes, keepdim)

    return rule


def of_booleans(op: Callable[..., Any]) -> Callable[..., Any]:
    """The largest or smallest and its position, of numbers in place of booleans.

    ONNX compares no booleans before opset 20. Other types stay as they are.
    """

    def rule(x: Tensor, *arguments: Any, **options: Any) -> Any:
        if x.dtype != torch.bool:
            return DECLINED
        values, positions = op(x.to(torch.int32), *arguments, **options)
        return values.bool(), positions

    return rule


RULES: Rules = {
    _aten.var_mean.correction: var_mean,
    **{op: extreme(op) for op in (_aten.amax.default, _aten.amin.default)},
    **{op: of_booleans(op) for op in (_aten.max.dim, _aten.min.dim)},
}
