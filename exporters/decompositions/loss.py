"""Classification loss. Labels select by comparison, which every runtime does fast, not by gather and scatter."""

from __future__ import annotations

import torch
from torch import Tensor

_aten = torch.ops.aten
_NONE, _MEAN = 0, 1


def log_softmax_backward(grad: Tensor, output: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """dL/dx = g - softmax(x) * sum(g), with ``output`` = log softmax(x)."""
    return (grad - output.exp() * grad.sum(dim, keepdim=True)).to(dtype)


def softmax_backward(grad: Tensor, output: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """dL/dx = y * (g - sum(g * y)), with ``output`` = y = softmax(x)."""
    weighted = grad * output
    return (weighted - output * weighted.sum(dim, keepdim=True)).to(dtype)


def nll_loss_forward(
    logp: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """L = -sum_n w_n * logp[n, y_n] / sum_n w_n over samples with y_n != ignore_index (float32 [N, C], int64 [N]).

    Returns the loss and the total weight, as the op does.
    """
    chosen = _one_hot(logp, target, weight, ignore_index)
    losses = -(chosen * logp).sum(-1)
    if reduction == _NONE:
        return losses, torch.zeros((), dtype=logp.dtype)
    total = chosen.sum()
    return (losses.sum() / total if reduction == _MEAN else losses.sum()), total


def nll_loss_backward(
    grad: Tensor,
    logp: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    total: Tensor,
) -> Tensor:
    """dL/dlogp[n, c] = -w_n [c == y_n] * g / total (mean), or without the division (sum, none)."""
    chosen = _one_hot(logp, target, weight, ignore_index)
    if reduction == _MEAN:
        grad = grad / total
    elif reduction == _NONE and grad.dim() == 1:
        grad = grad.unsqueeze(1)
    return -(chosen * grad)


def _one_hot(logp: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int) -> Tensor:
    """w_c [c == y_n] as [N, C]; a row is zero where y_n == ignore_index."""
    classes = torch.arange(logp.shape[-1], dtype=target.dtype)
    chosen = target.unsqueeze(-1) == classes
    if 0 <= ignore_index < logp.shape[-1]:
        chosen = chosen & (target != ignore_index).unsqueeze(-1)
    dense = chosen.to(logp.dtype)
    return dense if weight is None else dense * weight


RULES = {
    _aten._log_softmax_backward_data.default: log_softmax_backward,
    _aten._softmax_backward_data.default: softmax_backward,
    _aten.nll_loss_forward.default: nll_loss_forward,
    _aten.nll_loss_backward.default: nll_loss_backward,
}
