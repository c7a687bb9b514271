"""Padding: ExecuTorch's kernel takes no negative amounts, which crop."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from exporters.decompositions.rule import DECLINED, Rules

_aten = torch.ops.aten


def constant_pad(x: Tensor, amounts: Sequence[int], value: float = 0.0) -> Tensor:
    """Crop by the negative amounts, then pad by the others; two amounts an axis, last axis first."""
    if min(amounts, default=0) >= 0:
        return DECLINED
    for number, (before, after) in enumerate(zip(amounts[::2], amounts[1::2], strict=True)):
        axis = x.dim() - 1 - number
        first, last = max(-before, 0), x.shape[axis] - max(-after, 0)
        x = x.narrow(axis, first, last - first)
    padded: Tensor = _aten.constant_pad_nd(x, [max(amount, 0) for amount in amounts], value)
    return padded


RULES: Rules = {_aten.constant_pad_nd.default: constant_pad}
