"""Activations: gradients that select by comparison. The others decompose well as they are."""

from __future__ import annotations

import torch
from torch import Tensor

_aten = torch.ops.aten


def threshold_backward(grad: Tensor, value: Tensor, threshold: float) -> Tensor:
    """dL/dx = dL/dy where value > threshold, else 0 (``value`` is x or ReLU(x), any shape)."""
    zero = torch.zeros((), dtype=grad.dtype)
    return torch.where(value <= threshold, zero, grad)


def shrink_backward(grad: Tensor, x: Tensor, limit: float) -> Tensor:
    """dL/dx = dL/dy where abs(x) > limit, else 0: the gradient of both hardshrink and softshrink."""
    zero = torch.zeros((), dtype=grad.dtype)
    return torch.where(x.abs() <= limit, zero, grad)


RULES = {
    _aten.threshold_backward.default: threshold_backward,
    _aten.hardshrink_backward.default: shrink_backward,
    _aten.softshrink_backward.default: shrink_backward,
}
