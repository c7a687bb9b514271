"""A layer whose effects are visible: statistics go in and out as tensors, never behind the scenes.

``torch.nn.BatchNorm2d`` changes its buffers in place and counts batches in an integer, which no graph can hold that must
give the same outputs on three engines. So models here use this one, and :func:`edgefl.models.layers.visible.visible` puts
it into anybody's module.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from edgefl.wire.errors import ModelError

BnMode = Literal["global", "static"]


class BatchNorm(nn.Module):
    """Batch normalisation over every dimension but the channel (dim 1), in both modes of embracingfl.md 2.7.

    ``global``: training normalises with batch statistics and *rebinds* ``running_mean`` / ``running_var`` to
    ``keep * old + (1 - keep) * batch`` (unbiased variance, as torch), so that ``torch.func.functional_call`` hands
    the new values back; inference uses them. ``static``: there are no moving statistics, every pass normalises
    with those of its own batch (embracingfl.md 4.5, after HeteroFL).

    ``frozen``: training too uses the moving statistics and leaves them as they are, whatever mode the module is
    in, as people do who call ``bn.eval()`` before they fine-tune; of no effect in ``static``.
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
        frozen: bool = False,
    ) -> None:
        super().__init__()
        if mode not in ("global", "static"):
            raise ModelError(f"batch norm mode must be 'global' or 'static', found {mode!r}", mode=mode)
        self.channels, self.mode, self.keep, self.eps = channels, mode, keep, eps
        self.frozen = frozen
        self.weight = nn.Parameter(torch.ones(channels)) if affine else None
        self.bias = nn.Parameter(torch.zeros(channels)) if affine else None
        if mode == "global":
            self.register_buffer("running_mean", torch.zeros(channels))
            self.register_buffer("running_var", torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        if self.mode == "global" and (self.frozen or not self.training):
            mean, var = self.running_mean, self.running_var
            return F.batch_norm(x, mean, var, self.weight, self.bias, False, 0.0, self.eps)
        out, mean, inverse_std = torch.native_batch_norm(
            x, self.weight, self.bias, None, None, True, 0.0, self.eps
        )
        if self.mode == "global":
            self._move(mean.detach(), inverse_std.detach(), x.numel() // x.shape[1])
        return out

    def _move(self, mean: Tensor, inverse_std: Tensor, count: int) -> None:
        # The kernel has the variance already; recovering it from 1/std saves a second pass over the batch.
        biased = (inverse_std.pow(-2) - self.eps).clamp_min(0.0)
        unbiased = biased * (count / max(count - 1, 1))
        self.running_mean = self.running_mean * self.keep + mean * (1 - self.keep)
        self.running_var = self.running_var * self.keep + unbiased * (1 - self.keep)

    def extra_repr(self) -> str:
        frozen = ", frozen=True" if self.frozen else ""
        return f"{self.channels}, mode={self.mode!r}, keep={self.keep}, eps={self.eps}{frozen}"
