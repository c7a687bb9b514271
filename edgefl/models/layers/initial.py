"""Initial values drawn from a seed: He normal for convolutions, Glorot uniform for dense layers, as in Keras.

The paper's experiments ran on TensorFlow, so they probably used its defaults (embracingfl.md 2.7). A module with other
tensors, or other initial values, sets them itself (:class:`SelfInitializing`). The values come from a separate generator:
torch's global random state is neither read nor changed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from edgefl.models.layers.norms import BatchNorm
from edgefl.models.layers.recurrent import BiLstm


@runtime_checkable
class SelfInitializing(Protocol):
    """Interface of a module that sets its own initial values, such as positions or scales."""

    def fill(self, generator: torch.Generator) -> None:
        """Set each tensor of the module itself to its initial value, in place.

        Random values are drawn from ``generator``.
        """


@torch.no_grad()
def initialize(build: Callable[[], nn.Sequential], seed: int) -> nn.Sequential:
    """Build a module and set the initial values of all tensors. Equal seeds give equal bytes.

    Args:
        build: Function that returns the module. It runs under the meta device, so its tensors have no values.
        seed: Seed of the values.

    Returns:
        The module on the CPU, with values.
    """
    # Built without storage: torch's layers would otherwise draw their own initial values from the global generator.
    with torch.device("meta"):
        module = build()
    module.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(seed)
    for part in module.modules():
        if isinstance(part, SelfInitializing):
            part.fill(generator)
        elif isinstance(part, nn.Conv2d):
            fan_in = part.weight[0].numel()
            part.weight.normal_(0.0, math.sqrt(2.0 / fan_in), generator=generator)
            _zero(part.bias)
        elif isinstance(part, nn.Linear):
            _glorot(part.weight, generator)
            _zero(part.bias)
        elif isinstance(part, nn.Embedding):
            part.weight.uniform_(-0.05, 0.05, generator=generator)
        elif isinstance(part, BiLstm):
            _lstm(part, generator)
        elif isinstance(part, BatchNorm):
            _batch_norm(part)
        elif isinstance(part, nn.LayerNorm | nn.GroupNorm):
            part.weight.fill_(1.0)
            _zero(part.bias)
    return module


def _zero(tensor: Tensor | None) -> None:
    if tensor is not None:
        tensor.zero_()


def _glorot(weight: Tensor, generator: torch.Generator) -> None:
    bound = math.sqrt(6.0 / (weight.shape[0] + weight.shape[1]))
    weight.uniform_(-bound, bound, generator=generator)


def _batch_norm(part: BatchNorm) -> None:
    if part.weight is not None and part.bias is not None:
        part.weight.fill_(1.0)
        part.bias.zero_()
    if part.mode == "global":
        part.running_mean.zero_()
        part.running_var.fill_(1.0)


def _lstm(part: BiLstm, generator: torch.Generator) -> None:
    """Set the initial values of a bidirectional LSTM, in place.

    Input kernels are Glorot uniform, recurrent kernels an orthogonal matrix per gate, biases 0, but 1 at the forget gate.
    """
    for direction in part.directions:
        _glorot(direction.kernel, generator)
        for gate in direction.recurrent.chunk(4):
            square = torch.empty_like(gate).normal_(generator=generator)
            gate.copy_(torch.linalg.qr(square).Q)
        direction.bias.zero_()
        direction.bias.chunk(4)[1].fill_(1.0)
