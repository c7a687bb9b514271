"""Batch norm and instance norm of torch, with moving statistics that are written as tensors of the graph.

Torch's kernels change the statistics inside of one operation. The rule here computes the same in two: one that
normalises, and a visible write to each statistic.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.nn import functional as F

from edgefl.models.layers.explicit import moments

NormKind = Literal["batch", "instance", "native"]


@dataclass(frozen=True, eq=False)
class NormCall:
    """Call of one of torch's functions for batch norm or instance norm.

    ``kind``: "native" for the batch norm that also returns the mean and 1/std of the batch.
    ``training``: normalise by the batch (``use_input_stats`` of instance norm), else by the moving statistics.
    """

    kind: NormKind
    input: Tensor
    running_mean: Tensor | None = None
    running_var: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None
    training: bool = False
    momentum: float = 0.1
    eps: float = 1e-5

    @classmethod
    def of(
        cls, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> NormCall | None:
        """Return the call of ``function`` with these arguments, or None for a function that is no such norm."""
        if function not in _SIGNATURES:
            return None
        kind, names = _SIGNATURES[function]
        values = {"training": kind == "instance", **dict(zip(names, args, strict=False)), **kwargs}
        values["training"] = values.pop("use_input_stats", values["training"])
        values.pop("cudnn_enabled", None)
        return cls(kind, **values)

    def by_batch(self) -> Any:
        """Return the result if it normalises by the batch, the mean and 1/std of a batch norm too; moves nothing."""
        if self.kind == "instance":
            return F.instance_norm(
                self.input, None, None, self.weight, self.bias, True, self.momentum, self.eps
            )
        return torch.native_batch_norm(self.input, self.weight, self.bias, None, None, True, 0.0, self.eps)

    def result(self, made: Any) -> Any:
        """Return what the function itself returns of what :meth:`by_batch` ``made``."""
        return made[0] if self.kind == "batch" else made

    def statistics(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the mean and the unbiased variance of the batch by channel; of instance norm, means over the samples."""
        rows, per_sample = self.input.detach().to(dtype), self.kind == "instance"
        dims = [*range(2, rows.dim())] if per_sample else [dim for dim in range(rows.dim()) if dim != 1]
        mean, var = rows.mean(dims), rows.var(dims, correction=0)
        count = rows[0, 0].numel() if per_sample else rows.numel() // rows.shape[1]
        if per_sample:
            mean, var = mean.mean(0), var.mean(0)
        return mean, var * (count / max(count - 1, 1))


_FUNCTIONAL = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
_OPERATOR = (
    "input",
    "weight",
    "bias",
    "running_mean",
    "running_var",
    "training",
    "momentum",
    "eps",
)  # cudnn_enabled

_SIGNATURES: Mapping[Callable[..., Any], tuple[NormKind, tuple[str, ...]]] = {
    F.batch_norm: ("batch", _FUNCTIONAL),
    torch.batch_norm: ("batch", _OPERATOR),
    torch.native_batch_norm: ("native", _OPERATOR),
    F.instance_norm: ("instance", _FUNCTIONAL),
    torch.instance_norm: ("instance", _OPERATOR),
}


def _trained(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Rule for a norm in training; leaves inference, and norms whose kernel moves nothing, to torch."""
    call = NormCall.of(function, args, kwargs)
    if call is None or not call.training:
        return NotImplemented
    old_mean, old_var = call.running_mean, call.running_var
    if (old_mean is None or old_var is None) and call.kind != "batch":
        return NotImplemented
    made = call.by_batch()
    if old_mean is not None and old_var is not None:
        if call.kind == "instance":
            mean, var = call.statistics(call.input.dtype)
        else:
            mean, var = moments(call.input, made[1], made[2], call.eps)
        _move(old_mean, mean, call.momentum)
        _move(old_var, var, call.momentum)
    return call.result(made)


@torch.no_grad()
def _move(old: Tensor, new: Tensor, momentum: float) -> None:
    # Torch's kernels write the statistics unseen by autograd: a batch norm that ran in inference before may have saved them.
    with _unsafe_preserve_version_counter(old):
        # Not copy_: torch.func.vmap has no rule for it, which the simulator needs for many clients.
        old.mul_(1 - momentum).add_(new * momentum)


RULES: Mapping[Callable[..., Any], Callable[..., Any]] = {
    function: partial(_trained, function) for function in _SIGNATURES
}
"""By function; a rule returns NotImplemented for a call that it leaves to torch."""
