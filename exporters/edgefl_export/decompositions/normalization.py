"""Batch normalization, in training and frozen, in the two forms that :mod:`edgefl_export.onnx.ops` writes as one node.

PyTorch's own op hides a write to the running statistics in its schema. Here the batch statistics come out of a
functional op, and the running ones follow from them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from edgefl_export.operators import Rules

_aten = torch.ops.aten


def native_batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, *args: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute y = (x - m) / sqrt(v + eps) * weight + bias, with m and v of the batch (training) or the running ones.

    ``args`` are running mean, running variance, training, momentum and eps. Return (y, m, 1 / sqrt(v + eps)), the last
    two empty unless training.

    Training also updates the running statistics in place: r <- (1 - momentum) r + momentum s, where s is the batch mean
    or the unbiased batch variance. The op's schema hides this write.
    """
    running_mean, running_var, training, momentum, eps = args
    if not training:
        empty = x.new_zeros(0)
        frozen = _aten._native_batch_norm_legit_no_training
        return frozen(x, weight, bias, running_mean, running_var, momentum, eps)[0], empty, empty
    out, mean, rstd = _aten._native_batch_norm_legit.no_stats(x, weight, bias, True, momentum, eps)
    if running_mean is not None and running_var is not None:
        count = x.numel() // x.shape[1]
        unbiased = (rstd.pow(-2) - eps) * (count / max(count - 1, 1))
        running_mean.copy_(running_mean * (1 - momentum) + mean * momentum)
        running_var.copy_(running_var * (1 - momentum) + unbiased * momentum)
    return out, mean, rstd


Gradient = tuple[Tensor | None, Tensor | None, Tensor | None]


def backward_of(
    gradient: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]], times: Callable[[Tensor, Tensor], Tensor]
) -> Callable[..., Gradient]:
    """Return the rule for the gradient of batch norm that computes dL/dx = gain h.

    Args:
        gradient: function that returns h, gain, dL/dweight and dL/dbias, as :func:`batch_norm_gradient`.
        times: function that multiplies h by the gain of each channel.
    """

    def rule(grad: Tensor, x: Tensor, weight: Tensor | None, *args: Any) -> Gradient:
        *how, (wants_x, wants_weight, wants_bias) = args
        before, gain, slope, total = gradient(grad, x, weight, *how)
        dx = times(before, gain) if wants_x else None
        return dx, slope if wants_weight else None, total if wants_bias else None

    return rule


def batch_norm_gradient(
    grad: Tensor, x: Tensor, weight: Tensor | None, *args: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute (h like x, gain [C], dL/dweight [C], dL/dbias [C]), where dL/dx = gain h.

    ``args`` are running mean, running variance, m and s of the forward pass, training and eps. With s = 1 / sqrt(v +
    eps), n values per channel and sums over all axes but channels:

    * gain = weight s;  dL/dbias = sum g;  dL/dweight = s sum g (x - m)
    * frozen: h = g
    * training: h = g - dL/dbias / n - (x - m) s dL/dweight / n, written g + b x + c with one b, c per channel.
    """
    running_mean, running_var, save_mean, save_rstd, training, eps = args
    axes = [axis for axis in range(x.dim()) if axis != 1]
    mean, rstd = (save_mean, save_rstd) if training else (running_mean, (running_var + eps).rsqrt())
    gain = rstd if weight is None else rstd * weight
    sum_grad = grad.sum(axes)
    slope = (grad * (x - _channels(mean, x))).sum(axes) * rstd  # centred first: the sum would cancel badly
    if not training:
        return grad, gain, slope, sum_grad
    share = -x.shape[1] / x.numel()
    tilt = rstd * slope * share
    return grad + _affine(x, tilt, sum_grad * share - tilt * mean), gain, slope, sum_grad


def _affine(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Compute x * scale + shift per channel in one pass: frozen batch norm with mean 0 and variance 1."""
    zeros, ones = torch.zeros(x.shape[1], dtype=x.dtype), torch.ones(x.shape[1], dtype=x.dtype)
    out: Tensor = _aten._native_batch_norm_legit_no_training(x, scale, shift, zeros, ones, 0.0, 0.0)[0]
    return out


def _channels(value: Tensor, like: Tensor) -> Tensor:
    """Return [C] as [C, 1, ...], so that it broadcasts along the channel axis of ``like``."""
    return value.view(-1, *([1] * (like.dim() - 2)))


HIDDEN_MUTATIONS: Rules = {_aten.native_batch_norm.default: native_batch_norm}

_library = torch.library.Library("edgefl", "FRAGMENT")
_library.define(
    "batch_norm_gradient(Tensor grad, Tensor x, Tensor? weight, Tensor? running_mean, Tensor? running_var, "
    "Tensor? save_mean, Tensor? save_rstd, bool training, float eps) -> (Tensor, Tensor, Tensor, Tensor)"
)
_library.impl("batch_norm_gradient", batch_norm_gradient, "CompositeExplicitAutograd")
GRADIENT = torch.ops.edgefl.batch_norm_gradient.default
"""What a norm gives a convolution that takes the gain into its kernel (:mod:`edgefl_export.capture.rewrites`)."""

RULES: Rules = {
    GRADIENT: batch_norm_gradient,
    _aten.native_batch_norm_backward.default: backward_of(
        batch_norm_gradient, lambda before, gain: before * _channels(gain, before)
    ),
}
