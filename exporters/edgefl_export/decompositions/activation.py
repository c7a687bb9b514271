"""Activations, softmax and the classification loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from edgefl_export.operators import Rules

_aten = torch.ops.aten

# Activations: gradients that select by comparison, softmax of rows that may be masked, and the second derivative of GLU.
# The others decompose as they are.


def threshold_backward(grad: Tensor, value: Tensor, threshold: float) -> Tensor:
    """Compute dL/dx = dL/dy where value > threshold, else 0; ``value`` is x or ReLU(x), of any shape."""
    zero = torch.zeros((), dtype=grad.dtype)
    return torch.where(value <= threshold, zero, grad)


def shrink_backward(grad: Tensor, x: Tensor, limit: float) -> Tensor:
    """Compute dL/dx = dL/dy where abs(x) > limit, else 0: the gradient of both hardshrink and softshrink."""
    zero = torch.zeros((), dtype=grad.dtype)
    return torch.where(x.abs() <= limit, zero, grad)


def glu_jvp(out: Tensor, x: Tensor, dx: Tensor, dim: int) -> Tensor:
    """Compute the derivative of y = a sigmoid(b), x = [a, b] along ``dim``, in the direction ``dx``; ``out`` is y."""
    s = x.chunk(2, dim)[1].sigmoid()
    da, db = dx.chunk(2, dim)
    return da * s + out * (1 - s) * db


def glu_backward_jvp(grad_x: Tensor, grad: Tensor, x: Tensor, dgrad: Tensor, dx: Tensor, dim: int) -> Tensor:
    """Compute the derivative of the gradient of y = a sigmoid(b), x = [a, b] along ``dim``, in a direction.

    The gradient is dL/dx = [g s, g a s (1 - s)] with s = sigmoid(b) and g = ``grad``; the direction is (``dgrad``,
    ``dx``).
    """
    a, b = x.chunk(2, dim)
    da, db = dx.chunk(2, dim)
    s = b.sigmoid()
    slope = s * (1 - s)
    bent = (dgrad * a + grad * da) * slope + grad * a * (1 - 2 * s) * slope * db
    return torch.cat([dgrad * s + grad * slope * db, bent], dim)


# Classification loss. A label gathers its entry, and its gradient is scattered back: no [N, C] comparison.
#
# Each row has one label, so nothing is added up in the scatter.

_NONE, _MEAN = 0, 1


def log_softmax_backward(grad: Tensor, output: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """Compute dL/dx = g - softmax(x) * sum(g), where ``output`` is log softmax(x)."""
    return (grad - output.exp() * grad.sum(dim, keepdim=True)).to(dtype)


def softmax_backward(grad: Tensor, output: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """Compute dL/dx = y * (g - sum(g * y)), where ``output`` is y = softmax(x)."""
    weighted = grad * output
    return (weighted - output * weighted.sum(dim, keepdim=True)).to(dtype)


def nll_loss_forward(
    logp: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """Compute L = -sum_n w_n * logp[n, y_n] / sum_n w_n over samples with y_n != ignore_index (float32 [N, C], int64
    [N]).

    ``reduction`` 0 returns the terms of the sum, 1 the mean L, 2 the sum. Return (loss, total weight), as the op does.
    """
    counts, place, share = _pick_labels(logp, target, weight, ignore_index)
    zero = torch.zeros((), dtype=logp.dtype)
    losses = torch.where(counts, -logp.gather(-1, place.unsqueeze(-1)).squeeze(-1) * share, zero)
    if reduction == _NONE:
        return losses, zero
    total = share.sum()
    return (losses.sum() / total if reduction == _MEAN else losses.sum()), total


def nll_loss_backward(
    grad: Tensor, logp: Tensor, target: Tensor, weight: Tensor | None, *args: Any
) -> Tensor:
    """Compute dL/dlogp[n, c] = -w_n [c == y_n] * g / total (mean), or without the division (sum, none).

    ``args`` are the op's remaining arguments: reduction, ignore_index, and the total weight that the forward pass
    returned.
    """
    reduction, ignore_index, total = args
    counts, place, share = _pick_labels(logp, target, weight, ignore_index)
    # Selected and not multiplied: with no row that counts, grad / total is no number.
    row = torch.where(counts, -share * (grad / total if reduction == _MEAN else grad), 0.0)
    return torch.zeros_like(logp).scatter(-1, place.unsqueeze(-1), row.unsqueeze(-1))


def _pick_labels(
    logp: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (row weight 0 or 1, position of the label, class weight of the label) for each row.

    The row weight and the position of ignored rows are 0.
    """
    counts = target != ignore_index
    place = torch.where(counts, target, 0).long()
    share = counts.to(logp.dtype) if weight is None else weight[place] * counts.to(logp.dtype)
    return counts, place, share


# erfc(|x|) = t exp(-x^2 + c_0 + c_1 t + ... + c_9 t^9) with t = 1 / (1 + |x| / 2), to 1.2e-7 of each value: Press and
# others, Numerical Recipes in C, 6.2. 1 - erf(x) is 0 from 4 on.
_TAIL = (
    *(-1.26551223, 1.00002368, 0.37409196, 0.09678418, -0.18628806),
    *(0.27886807, -1.13520398, 1.48851587, -0.82215223, 0.17087277),
)


def erfc(x: Tensor) -> Tensor:
    """Compute 1 - erf(x) without losing the digits of small results."""
    x = x if x.is_floating_point() else x.to(torch.get_default_dtype())
    t = 1.0 / (x.abs() * 0.5 + 1.0)
    exponent = t * _TAIL[-1]
    for factor in _TAIL[-2:0:-1]:
        exponent = (exponent + factor) * t
    tail = t * (exponent + _TAIL[0] - x * x).exp()
    return torch.where(x < 0, 2.0 - tail, tail)


RULES: Rules = {
    _aten.erfc.default: erfc,
    _aten.special_erfc.default: erfc,
    _aten.glu_jvp.default: glu_jvp,
    _aten.glu_backward_jvp.default: glu_backward_jvp,
    _aten.threshold_backward.default: threshold_backward,
    _aten.hardshrink_backward.default: shrink_backward,
    _aten.softshrink_backward.default: shrink_backward,
    _aten._log_softmax_backward_data.default: log_softmax_backward,
    _aten._softmax_backward_data.default: softmax_backward,
    _aten.nll_loss_forward.default: nll_loss_forward,
    _aten.nll_loss_backward.default: nll_loss_backward,
}
