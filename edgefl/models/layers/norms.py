"""Normalisation layers of the zoo: batch norm with its statistics as tensors, and group norm."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from edgefl.errors import ModelError

BnMode = Literal["global", "static"]


class BatchNorm(nn.Module):
    """Batch normalisation over every dimension except the channel (dim 1), in both modes of embracingfl.md 2.7.

    ``global``: training normalises with the statistics of the batch. It *rebinds* ``running_mean`` and ``running_var``
    to ``keep * old + (1 - keep) * batch`` (unbiased variance, as in torch), so that ``torch.func.functional_call``
    returns them. Inference normalises with these. ``static``: there are no moving statistics, and inference too
    normalises with the statistics of its own batch (embracingfl.md 4.5, after HeteroFL). Batches are not counted in
    either mode.

    Args:
        channels: Number of channels.
        mode: ``global`` or ``static``.
        keep: Weight of the old moving statistics.
        eps: Added to the variance.
        affine: Multiply by a weight and add a bias per channel.

    Raises:
        ModelError: ``mode`` is unknown.
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(
        self,
        channels: int,
        *,
        mode: BnMode = "global",
        keep: float = 0.9,
        eps: float = 1e-5,
        affine: bool = True,
    ) -> None:
        super().__init__()
        if mode not in ("global", "static"):
            raise ModelError(f"batch norm mode must be 'global' or 'static', found {mode!r}", mode=mode)
        self.channels, self.mode, self.keep, self.eps = channels, mode, keep, eps
        self.weight = nn.Parameter(torch.ones(channels)) if affine else None
        self.bias = nn.Parameter(torch.zeros(channels)) if affine else None
        if mode == "global":
            self.register_buffer("running_mean", torch.zeros(channels))
            self.register_buffer("running_var", torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        if self.mode == "global" and not self.training:
            mean, var = self.running_mean, self.running_var
            return F.batch_norm(x, mean, var, self.weight, self.bias, False, 0.0, self.eps)
        out, mean, inverse_std = torch.native_batch_norm(
            x, self.weight, self.bias, None, None, True, 0.0, self.eps
        )
        if self.mode == "global":
            batch_mean, batch_var = moments(x, mean, inverse_std, self.eps)
            self.running_mean = self.running_mean * self.keep + batch_mean * (1 - self.keep)
            self.running_var = self.running_var * self.keep + batch_var * (1 - self.keep)
        return out

    def extra_repr(self) -> str:
        return f"{self.channels}, mode={self.mode!r}, keep={self.keep}, eps={self.eps}"


def moments(x: Tensor, mean: Tensor, inverse_std: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return (mean, unbiased variance) of a batch, each per channel (C,) and detached from the autograd graph.

    Args:
        x: Batch (B, C, ...).
        mean: Mean per channel, as the kernel ``native_batch_norm`` returned it.
        inverse_std: 1 / sqrt(biased variance + eps) per channel, as the kernel returned it.
        eps: Constant that the kernel added to the variance.
    """
    count = x.numel() // x.shape[1]
    # The kernel has the variance already; recovering it from 1/std saves a second pass over the batch.
    biased = (inverse_std.detach().pow(-2) - eps).clamp_min(0.0)
    return mean.detach(), biased * (count / max(count - 1, 1))


NormKind = Literal["bn", "gn"]
MakeNorm = Callable[[int], nn.Module]
"""Function that returns a normalisation layer for a number of channels."""

GROUPS = 8


def make_norm(kind: NormKind, *, mode: BnMode = "global", groups: int = GROUPS) -> MakeNorm:
    """Return a function that makes a normalisation layer for a number of channels.

    Group norm has the same weight and bias as batch norm and no statistics, so a device sends only trained tensors of
    it. Use it if the moving statistics of skewed clients average badly (fedbat.md 8.4). The paper does not give the
    number of groups; 8 divides the widths of every model of the zoo.

    Args:
        kind: ``bn`` for :class:`BatchNorm`, ``gn`` for group norm.
        mode: Mode of a batch norm.
        groups: Number of groups of neighbouring channels of a group norm.

    Raises:
        ModelError: The kind is unknown, or an option belongs to the other kind. The returned function raises it if the
            groups do not divide the channels.
    """
    if kind == "bn":
        if groups != GROUPS:
            raise ModelError(
                f"batch norm has no groups, found groups={groups} with norm='bn': leave groups out, or take norm='gn'",
                groups=groups,
            )
        return partial(BatchNorm, mode=mode)
    if kind != "gn":
        raise ModelError(f"a norm is 'bn' (batch norm) or 'gn' (group norm), found {kind!r}", norm=kind)
    if mode != "global":
        raise ModelError(
            f"group norm has no batch norm mode, found bn={mode!r} with norm='gn': leave bn out, or take norm='bn'",
            bn=mode,
        )
    return partial(_group_norm, groups=groups)


def _group_norm(channels: int, *, groups: int) -> nn.GroupNorm:
    if groups < 1 or channels % groups:
        raise ModelError(
            f"{groups} groups do not divide {channels} channels: set groups to a divisor of every width",
            groups=groups,
            channels=channels,
        )
    return nn.GroupNorm(groups, channels)
