"""Batch normalization, in training and frozen, spelled out with one scale and one shift per channel.

Spelled out rather than left as one op: torch.onnx writes the inference form of BatchNormalization for it, and
the training form makes onnxruntime write the new running mean over its input, weights of the caller included.
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
        empty = x.new_zeros(0)
        return _affine(x, weight, bias, running_mean, _rstd(running_var, eps)), empty, empty
    mean = x.mean(_not_channels(x))
    centred = x - _channels(mean, x)
    variance = (centred * centred).mean(_not_channels(x))
    rstd = _rstd(variance, eps)
    if running_mean is not None and running_var is not None:
        count = x.numel() // x.shape[1]
        unbiased = variance * (count / max(count - 1, 1))
        running_mean.copy_(running_mean * (1 - momentum) + mean * momentum)
        running_var.copy_(running_var * (1 - momentum) + unbiased * momentum)
    return _affine(x, weight, bias, mean, rstd), mean, rstd


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
    axes = _not_channels(x)
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


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, rstd: Tensor) -> Tensor:
    """y = x * scale + shift; the centred x is not kept, which would cost a second tensor of its size."""
    scale = rstd if weight is None else rstd * weight
    shift = -mean * scale if bias is None else bias - mean * scale
    return x * _channels(scale, x) + _channels(shift, x)


def _rstd(var: Tensor | None, eps: float) -> Tensor:
    assert var is not None
    return (var + eps).rsqrt()


def _not_channels(x: Tensor) -> list[int]:
    return [axis for axis in range(x.dim()) if axis != 1]


def _channels(value: Tensor, like: Tensor) -> Tensor:
    """[C] -> [C, 1, ...], so that it broadcasts along the channel axis of ``like``."""
    return value.view(-1, *([1] * (like.dim() - 2)))


HIDDEN_MUTATIONS = {_aten.native_batch_norm.default: native_batch_norm}

RULES = {_aten.native_batch_norm_backward.default: native_batch_norm_backward}
