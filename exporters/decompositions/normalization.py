"""Batch normalization, in training and frozen.

Training forward stays one op (``_native_batch_norm_legit.no_stats``: batch statistics only), because the formula
in separate ops needs two more tensors of the size of x. The running statistics are ordinary outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

_aten = torch.ops.aten


def native_batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """y = (x - m) / sqrt(v + eps) * weight + bias, with m, v of the batch (training) or the running ones.

    Training also moves the running statistics: r <- (1 - momentum) r + momentum s, where s is the batch mean or
    the unbiased batch variance. The op's schema hides this write, so it is spelled out here.
    """
    if not training:
        assert running_mean is not None and running_var is not None
        y = _frozen(x, weight, bias, running_mean, running_var, eps)
        return y, x.new_zeros(0), x.new_zeros(0)
    y, mean, rstd = _aten._native_batch_norm_legit.no_stats(x, weight, bias, True, momentum, eps)
    if running_mean is not None and running_var is not None:
        count = x.numel() // x.shape[1]
        variance = (rstd.pow(-2) - eps) * (count / max(count - 1, 1))
        running_mean.copy_(running_mean * (1 - momentum) + mean * momentum)
        running_var.copy_(running_var * (1 - momentum) + variance * momentum)
    return y, mean, rstd


def native_batch_norm_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    save_mean: Tensor | None,
    save_rstd: Tensor | None,
    training: bool,
    eps: float,
    output_mask: list[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """With s = 1 / sqrt(v + eps), n values per channel and sums over all axes but channels:

    * dL/dbias = sum g;  dL/dweight = s sum g (x - m)
    * frozen: dL/dx = weight s g
    * training: dL/dx = weight s (g - dL/dbias / n - (x - m) s dL/dweight / n), written a g + b x + c with one
      a, b, c per channel.
    """
    axes = [axis for axis in range(x.dim()) if axis != 1]
    mean, rstd = (save_mean, save_rstd) if training else (running_mean, _rstd(running_var, eps))
    assert mean is not None and rstd is not None
    gain = rstd if weight is None else rstd * weight
    sum_grad = grad.sum(axes)
    slope = (grad * (x - _channels(mean, x))).sum(axes) * rstd  # centred first: the sum would cancel badly
    grad_x = None
    if output_mask[0] and training:
        count = x.numel() // x.shape[1]
        tilt = gain * rstd * slope * (-1.0 / count)
        shift = gain * sum_grad * (-1.0 / count) - tilt * mean
        grad_x = grad * _channels(gain, x) + (x * _channels(tilt, x) + _channels(shift, x))
    elif output_mask[0]:
        grad_x = grad * _channels(gain, x)
    return grad_x, slope if output_mask[1] else None, sum_grad if output_mask[2] else None


def _frozen(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, var: Tensor, eps: float
) -> Tensor:
    """y = x * scale + shift with one scale and shift per channel."""
    scale = _rstd(var, eps) if weight is None else _rstd(var, eps) * weight
    shift = -mean * scale if bias is None else bias - mean * scale
    return x * _channels(scale, x) + _channels(shift, x)


def _rstd(var: Tensor | None, eps: float) -> Tensor:
    assert var is not None
    return (var + eps).rsqrt()


def _channels(value: Tensor, like: Tensor) -> Tensor:
    """[C] -> [C, 1, ...], so that it broadcasts along the channel axis of ``like``."""
    return value.view(-1, *([1] * (like.dim() - 2)))


HIDDEN_MUTATIONS = {_aten.native_batch_norm.default: native_batch_norm}

RULES = {_aten.native_batch_norm_backward.default: native_batch_norm_backward}
