"""Reductions that return more than one tensor."""

from __future__ import annotations

import torch
from torch import Tensor

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


RULES = {_aten.var_mean.correction: var_mean}
