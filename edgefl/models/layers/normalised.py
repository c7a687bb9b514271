"""Batch norm and instance norm of torch, with moving statistics that are written as tensors of the graph.

Torch's kernels change the statistics inside of one operation. The rules here compute the same in two: one that
normalises, and a visible write to each statistic.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.nn import functional as F

from edgefl.models.layers.explicit import moments


def batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    """Rule for ``torch.nn.functional.batch_norm`` in training; leaves inference to torch."""
    return (
        _trained(input, weight, bias, running_mean, running_var, momentum, eps)[0]
        if training
        else NotImplemented
    )


def _of_torch(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool = False,
) -> Any:
    return batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)


def _native(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    if not training or running_mean is None:
        return NotImplemented
    return _trained(input, weight, bias, running_mean, running_var, momentum, eps)


def _trained(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    out, mean, inverse_std = torch.native_batch_norm(x, weight, bias, None, None, True, 0.0, eps)
    if running_mean is not None and running_var is not None:
        batch_mean, batch_var = moments(x, mean, inverse_std, eps)
        _move(running_mean, batch_mean, momentum)
        _move(running_var, batch_var, momentum)
    return out, mean, inverse_std


def instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    """Rule for ``torch.nn.functional.instance_norm`` where it moves statistics: by the mean over the samples."""
    if not use_input_stats or running_mean is None or running_var is None:
        return NotImplemented
    rows, places = input.detach(), list(range(2, input.dim()))
    count = input[0, 0].numel()
    _move(running_mean, rows.mean(places).mean(0), momentum)
    _move(running_var, rows.var(places, correction=0).mean(0) * (count / max(count - 1, 1)), momentum)
    return F.instance_norm(input, None, None, weight, bias, True, momentum, eps)


def _instance_of_torch(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool = False,
) -> Any:
    return instance_norm(input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)


@torch.no_grad()
def _move(old: Tensor, new: Tensor, momentum: float) -> None:
    # Torch's kernels write the statistics unseen by autograd: a batch norm that ran in inference before may have saved them.
    with _unsafe_preserve_version_counter(old):
        # Not copy_: torch.func.vmap has no rule for it, which the simulator needs for many clients.
        old.mul_(1 - momentum).add_(new * momentum)


RULES: Mapping[Callable[..., Any], Callable[..., Any]] = {
    F.batch_norm: batch_norm,
    torch.batch_norm: _of_torch,
    torch.native_batch_norm: _native,
    F.instance_norm: instance_norm,
    torch.instance_norm: _instance_of_torch,
}
"""By function; a rule returns NotImplemented for a call that it leaves to torch."""
