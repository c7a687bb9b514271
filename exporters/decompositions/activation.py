"""Activations: gradients that select by comparison, softmax of rows that may be masked, and the second derivative of GLU.
The others decompose as they are."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from exporters.decompositions.rule import Rules

_aten = torch.ops.aten


def threshold_backward(grad: Tensor, value: Tensor, threshold: float) -> Tensor:
    """dL/dx = dL/dy where value > threshold, else 0 (``value`` is x or ReLU(x), any shape)."""
    zero = torch.zeros((), dtype=grad.dtype)
    return torch.where(value <= threshold, zero, grad)


def shrink_backward(grad: Tensor, x: Tensor, limit: float) -> Tensor:
    """dL/dx = dL/dy where abs(x) > limit, else 0: the gradient of both hardshrink and softshrink."""
    zero = torch.zeros((), dtype=grad.dtype)
    return torch.where(x.abs() <= limit, zero, grad)


def safe_softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """Softmax, and 0 where a whole row is minus infinity, told by its largest number: torch looks at each."""
    given = x if dtype is None else x.to(dtype)
    shares: Tensor = _aten._softmax(given, dim, False)
    return torch.where(
        given.amax(dim, keepdim=True) == -math.inf, torch.zeros((), dtype=shares.dtype), shares
    )


def glu_jvp(out: Tensor, x: Tensor, dx: Tensor, dim: int) -> Tensor:
    """Derivative of y = a sigmoid(b), x = [a, b] along ``dim``, in the direction ``dx``; ``out`` is y."""
    s = x.chunk(2, dim)[1].sigmoid()
    da, db = dx.chunk(2, dim)
    return da * s + out * (1 - s) * db


def glu_backward_jvp(grad_x: Tensor, grad: Tensor, x: Tensor, dgrad: Tensor, dx: Tensor, dim: int) -> Tensor:
    """Derivative of dL/dx = [g s, g a s (1 - s)], s = sigmoid(b), in the direction (``dgrad``, ``dx``)."""
    a, b = x.chunk(2, dim)
    da, db = dx.chunk(2, dim)
    s = b.sigmoid()
    slope = s * (1 - s)
    bent = (dgrad * a + grad * da) * slope + grad * a * (1 - 2 * s) * slope * db
    return torch.cat([dgrad * s + grad * slope * db, bent], dim)


RULES: Rules = {
    _aten._safe_softmax.default: safe_softmax,
    _aten.glu_jvp.default: glu_jvp,
    _aten.glu_backward_jvp.default: glu_backward_jvp,
    _aten.threshold_backward.default: threshold_backward,
    _aten.hardshrink_backward.default: shrink_backward,
    _aten.softshrink_backward.default: shrink_backward,
}
