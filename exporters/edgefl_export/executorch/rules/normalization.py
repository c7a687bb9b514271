"""Batch and layer normalization as element-wise ops and sums that XNNPACK runs; variances in two passes.

The formulas are in :mod:`edgefl_export.decompositions.normalization`; here images are channels last.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from edgefl_export.decompositions.normalization import GRADIENT, Gradient, backward_of
from edgefl_export.operators import Rules

_aten = torch.ops.aten


def batch_statistics_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, training: bool, momentum: float, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute (y, m, r): y = (x - m) r weight + bias with m = mean, r = 1 / sqrt(mean (x - m)^2 + eps) per channel."""
    last = _last(x)
    axes = list(range(last.dim() - 1))
    share = x.shape[1] / x.numel()
    mean = last.sum(axes) * share
    centred = last - mean
    rstd = ((centred * centred).sum(axes) * share + eps).rsqrt()
    y = centred * (rstd if weight is None else rstd * weight)
    return _first(y if bias is None else y + bias), mean, rstd


def frozen_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, *args: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute y = (x - running mean) weight / sqrt(running variance + eps) + bias. Return y and two empty tensors for
    the statistics.

    ``args`` are running mean, running variance, momentum and eps.
    """
    running_mean, running_var, _, eps = args
    rstd = (running_var + eps).rsqrt()
    y = (_last(x) - running_mean) * (rstd if weight is None else rstd * weight)
    empty = x.new_zeros(0)
    return _first(y if bias is None else y + bias), empty, empty


def batch_norm_gradient(
    grad: Tensor, x: Tensor, weight: Tensor | None, *args: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute (h like x, gain [C], dL/dweight [C], dL/dbias [C]), where dL/dx = gain h.

    ``args`` are running mean, running variance, m and r of the forward pass, training and eps. With c = x - m, r = 1 /
    sqrt(variance + eps) and n values per channel:

    * gain = weight r;  dL/dbias = sum g;  dL/dweight = r sum g c
    * frozen: h = g
    * training: h = g - c (r dL/dweight / n) - dL/dbias / n.
    """
    running_mean, running_var, save_mean, save_rstd, training, eps = args
    g, last = _last(grad), _last(x)
    if not training:
        save_mean, save_rstd = running_mean, (running_var + eps).rsqrt()
    axes = list(range(g.dim() - 1))
    gain = save_rstd if weight is None else save_rstd * weight
    centred = last - save_mean
    total, slope = g.sum(axes), (g * centred).sum(axes) * save_rstd
    if not training:
        return grad, gain, slope, total
    share = -x.shape[1] / x.numel()
    return _first(g + centred * (save_rstd * slope * share) + total * share), gain, slope, total


batch_norm_backward = backward_of(batch_norm_gradient, lambda before, gain: _first(_last(before) * gain))


def _last(x: Tensor) -> Tensor:
    """Move the channel axis from second to last."""
    return x if x.dim() == 2 else x.permute(0, *range(2, x.dim()), 1)


def _first(x: Tensor) -> Tensor:
    return x if x.dim() == 2 else x.permute(0, x.dim() - 1, *range(1, x.dim() - 1))


def layer_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute (y, m, r): y = (x - m) r weight + bias over the last axes, which have ``shape``.

    m and r keep the reduced axes with length 1.
    """
    size = math.prod(shape)
    rows = _rows(x, shape)
    mean = rows.sum([-1], keepdim=True) * (1.0 / size)
    centred = rows - mean
    rstd = ((centred * centred).sum([-1], keepdim=True) * (1.0 / size) + eps).rsqrt()
    y = centred * rstd
    y = y if weight is None else y * weight.reshape(-1)
    y = y if bias is None else y + bias.reshape(-1)
    mean_shape = (*x.shape[: x.dim() - len(shape)], *[1] * len(shape))
    return y.view(x.shape), mean.view(mean_shape), rstd.view(mean_shape)


def _rows(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Merge the normalized axes, of ``shape``, into one last axis."""
    return x if len(shape) == 1 < x.dim() else x.reshape(-1, math.prod(shape))


def layer_norm_backward(grad: Tensor, x: Tensor, shape: Sequence[int], *args: Any) -> Gradient:
    """Compute the gradients of layer normalization. With h = (x - m) r, d = g weight and means over the last axes:

    dL/dx = r (d - mean d - h mean (d h)); dL/dweight = sum g h; dL/dbias = sum g over the other axes.

    ``args`` are m, r, weight, bias and output_mask; the result is None for each gradient that the mask does not
    request.
    """
    mean, rstd, weight, _, output_mask = args
    size = math.prod(shape)
    g, rows = _rows(grad, shape), _rows(x, shape)
    scale = rstd.reshape(*rows.shape[:-1], 1)
    unit = (rows - mean.reshape(scale.shape)) * scale
    before = list(range(rows.dim() - 1))
    dx = dw = db = None
    if output_mask[0]:
        d = g if weight is None else g * weight.reshape(-1)
        level = d.sum([-1], keepdim=True) * (1.0 / size)
        tilt = (d * unit).sum([-1], keepdim=True) * (1.0 / size)
        dx = ((d - level - unit * tilt) * scale).view(x.shape)
    if output_mask[1]:
        dw = (g * unit).sum(before).view(tuple(shape))
    if output_mask[2]:
        db = g.sum(before).view(tuple(shape))
    return dx, dw, db


RULES: Rules = {
    _aten._native_batch_norm_legit.no_stats: batch_statistics_norm,
    _aten._native_batch_norm_legit_no_training.default: frozen_norm,
    GRADIENT: batch_norm_gradient,
    _aten.native_batch_norm_backward.default: batch_norm_backward,
    _aten.native_layer_norm.default: layer_norm,
    _aten.native_layer_norm_backward.default: layer_norm_backward,
}
