"""Initial values drawn from a seed: the defaults of the layers in Keras, or those in torch.

Keras's are the default, because EmbracingFL's experiments ran on TensorFlow (embracingfl.md 2.7). The values come from a
separate generator: torch's global random state is neither read nor changed. A module with other tensors, or other initial
values, sets them itself (:class:`SelfInitializing`).

| layer | keras | torch |
|---|---|---|
| convolution | He normal, zero bias | weight and bias uniform in +-1/sqrt(fan_in) |
| dense | Glorot uniform, zero bias | weight and bias uniform in +-1/sqrt(fan_in) |
| embedding | uniform in +-0.05 | N(0, 1) |
| LSTM | Glorot uniform, orthogonal; bias 0, forget gate 1 | all uniform in +-1/sqrt(H), the bias as a sum of two |
| norm | weight 1, bias 0 | weight 1, bias 0 |
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, Protocol, get_args, runtime_checkable

import torch
from torch import Tensor, nn

from edgefl.errors import ModelError
from edgefl.models.layers.norms import BatchNorm
from edgefl.models.layers.recurrent import LstmDirection

Initial = Literal["keras", "torch"]
"""Library whose defaults the initial values follow."""


@runtime_checkable
class SelfInitializing(Protocol):
    """Interface of a module that sets its own initial values, such as positions or scales."""

    def fill(self, generator: torch.Generator) -> None:
        """Set each tensor of the module itself to its initial value, in place.

        Random values are drawn from ``generator``.
        """


@torch.no_grad()
def initialize(build: Callable[[], nn.Sequential], seed: int, initial: Initial = "keras") -> nn.Sequential:
    """Build a module and set the initial values of all tensors. Equal seeds give equal bytes.

    Args:
        build: Function that returns the module. It runs under the meta device, so its tensors have no values.
        seed: Seed of the values.
        initial: Library whose defaults the layers get. A :class:`SelfInitializing` module keeps its own values.

    Returns:
        The module on the CPU, with values. ``torch`` gives it the bytes that torch's own layers have after
        ``torch.manual_seed(seed)``.

    Raises:
        ModelError: ``initial`` is unknown, or a layer has tensors and no rule for their initial values.
    """
    if initial not in get_args(Initial):
        raise ModelError(
            f"expected initial values 'keras' or 'torch', found {initial!r}: correct the option `initial`",
            initial=initial,
        )
    # Built without storage: torch's layers would otherwise draw their own initial values from the global generator.
    with torch.device("meta"):
        module = build()
    module.to_empty(device="cpu")
    fill = _fill_as_keras if initial == "keras" else _fill_as_torch
    generator = torch.Generator().manual_seed(seed)
    for path, part in module.named_modules():
        if isinstance(part, SelfInitializing):
            part.fill(generator)
        elif isinstance(part, BatchNorm):
            _fill_batch_norm(part)
        elif isinstance(part, nn.LayerNorm | nn.GroupNorm):
            part.reset_parameters()  # draws nothing
        elif not fill(part, generator) and [*part.parameters(recurse=False), *part.buffers(recurse=False)]:
            kind = type(part).__name__
            raise ModelError(
                f"there is no rule for the initial values of layer {path!r} ({kind}): use another layer, or give its class "
                "a method fill(generator)",
                layer=path,
                kind=kind,
            )
    return module


def _fill_as_keras(part: nn.Module, generator: torch.Generator) -> bool:
    """Set the initial values of a layer to Keras's defaults. Return False if there is no rule for it."""
    if isinstance(part, nn.Conv1d | nn.Conv2d):
        fan_in = part.weight[0].numel()
        part.weight.normal_(0.0, math.sqrt(2.0 / fan_in), generator=generator)
        _zero(part.bias)
    elif isinstance(part, nn.Linear):
        _glorot(part.weight, generator)
        _zero(part.bias)
    elif isinstance(part, nn.Embedding):
        part.weight.uniform_(-0.05, 0.05, generator=generator)
    elif isinstance(part, LstmDirection):
        _glorot(part.kernel, generator)
        for gate in part.recurrent.chunk(4):
            square = torch.empty_like(gate).normal_(generator=generator)
            gate.copy_(torch.linalg.qr(square).Q)
        part.bias.zero_()
        part.bias.chunk(4)[1].fill_(1.0)
    else:
        return False
    return True


def _fill_as_torch(part: nn.Module, generator: torch.Generator) -> bool:
    """Set the initial values of a layer to torch's defaults. Return False if there is no rule for it.

    Draws as the layer's ``reset_parameters`` does, which takes no generator.
    """
    if isinstance(part, nn.Conv1d | nn.Conv2d | nn.Linear):
        nn.init.kaiming_uniform_(part.weight, a=math.sqrt(5), generator=generator)
        if part.bias is not None:
            bound = 1 / math.sqrt(part.weight[0].numel())
            part.bias.uniform_(-bound, bound, generator=generator)
    elif isinstance(part, nn.Embedding):
        part.weight.normal_(generator=generator)
    elif isinstance(part, LstmDirection):
        bound = 1 / math.sqrt(part.hidden)
        # torch's LSTM adds two biases, drawn apart; this cell has one, which starts as their sum.
        second = torch.empty_like(part.bias)
        for tensor in (part.kernel, part.recurrent, part.bias, second):
            tensor.uniform_(-bound, bound, generator=generator)
        part.bias.add_(second)
    else:
        return False
    return True


def _zero(tensor: Tensor | None) -> None:
    if tensor is not None:
        tensor.zero_()


def _glorot(weight: Tensor, generator: torch.Generator) -> None:
    bound = math.sqrt(6.0 / (weight.shape[0] + weight.shape[1]))
    weight.uniform_(-bound, bound, generator=generator)


def _fill_batch_norm(part: BatchNorm) -> None:
    if part.weight is not None and part.bias is not None:
        part.weight.fill_(1.0)
        part.bias.zero_()
    if part.mode == "global":
        part.running_mean.zero_()
        part.running_var.fill_(1.0)
