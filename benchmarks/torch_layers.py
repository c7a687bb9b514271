"""Models with torch's own layers instead of ours: the fair baseline of a comparison.

Our layers make randomness an input and recurrences traceable, which torch users do not need. Their replacements are
``nn.BatchNorm``, ``nn.Dropout``, ``nn.LSTM``, ``nn.GRU``, and the losses of ``torch.nn.functional``.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from edgefl.errors import ModelError
from edgefl.models.copies import copy_module
from edgefl.models.layers.norms import BatchNorm
from edgefl.models.layers.recurrent import LSTM, BiLstm, Stack

AGREES = 1e-3
"""Largest difference between outputs, relative to the largest output: both sides run the same kernels of torch."""


class AnyBatchNorm(nn.modules.batchnorm._BatchNorm):
    """Batch norm of torch for inputs of any number of dimensions."""

    def _check_input_dim(self, input: Tensor) -> None:
        """Accept every shape."""


class Recurrent(nn.Module):
    """``nn.LSTM`` or ``nn.GRU`` that returns its hidden states, (B, T, E) -> (B, T, D*H)."""

    def __init__(self, layers: nn.LSTM | nn.GRU) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.layers(x)[0])


class LastOfBoth(nn.Module):
    """Bidirectional ``nn.LSTM`` that returns the last hidden states of its directions, (B, T, E) -> (B, 2H)."""

    def __init__(self, features: int, hidden: int, rate: float) -> None:
        super().__init__()
        self.layers = nn.LSTM(features, hidden, batch_first=True, bidirectional=True)
        self.drop = nn.Dropout(rate)

    def forward(self, x: Tensor) -> Tensor:
        _, (h, _) = self.layers(self.drop(x))
        return cast(Tensor, self.drop(torch.cat((h[0], h[1]), dim=1)))


def to_torch_layers(module: nn.Sequential) -> nn.Sequential:
    """Return a copy in training mode, with the same values and torch's own layers instead of ours."""
    return cast(nn.Sequential, _replaced(_training(module)))


def _training(module: nn.Sequential) -> nn.Sequential:
    """Return a copy in training mode; parts in inference mode inside a module in training mode stay so."""
    made = copy_module(module)
    return made if made.training else made.train()


@torch.no_grad()
def check_torch_layers(module: nn.Sequential, x: Tensor) -> None:
    """Raise ModelError unless :func:`to_torch_layers` computes the same as ``module`` in training on ``x`` (B, ...).

    Dropout is off on both sides, because its noise differs. A baseline that computes something else must not be timed.
    """
    ours = _training(module)
    for part in ours.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
        elif isinstance(part, nn.RNNBase):
            part.dropout = 0.0
    theirs = to_torch_layers(ours)
    wanted, output = ours(x), theirs(x)
    if not isinstance(output, Tensor) or output.shape != wanted.shape:
        shape = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise ModelError(
            f"torch's own layers give {shape} where the model gives {tuple(wanted.shape)}: {_NO_BASELINE}",
            found=shape,
        )
    error = float((output - wanted).abs().max() / wanted.abs().max().clamp_min(1e-30))
    if not error <= AGREES:
        raise ModelError(
            f"torch's own layers differ by {error:.2g} of the largest output from the model: {_NO_BASELINE}",
            error=error,
        )


_NO_BASELINE = "there is nothing fair to measure against; please report which layers the model has"


def _replaced(module: nn.Module) -> nn.Module:
    if isinstance(module, BatchNorm):
        return _batch_norm(module)
    if isinstance(module, BiLstm) and module.skip == 0:
        return _last_of_both(module)
    if isinstance(module, Stack):
        return _recurrent(module)
    for name, child in list(module.named_children()):
        setattr(module, name, _replaced(child))
    return module


def _batch_norm(old: BatchNorm) -> nn.Module:
    tracked = old.mode == "global"
    new = AnyBatchNorm(old.channels, old.eps, 1 - old.keep, old.weight is not None, tracked)
    new.load_state_dict(old.state_dict(), strict=False)  # torch's has a counter more
    return _frozen_as(new, old)


def _last_of_both(old: BiLstm) -> LastOfBoth:
    new = LastOfBoth(old.features, old.hidden, old.drop_in.p)
    state: dict[str, Tensor] = {}
    for end, cell in zip(("", "_reverse"), old.directions, strict=True):
        state |= {f"weight_ih_l0{end}": cell.kernel, f"weight_hh_l0{end}": cell.recurrent}
        # Torch has two biases, which it adds.
        state |= {f"bias_ih_l0{end}": cell.bias, f"bias_hh_l0{end}": torch.zeros_like(cell.bias)}
    new.layers.load_state_dict(state)
    return new


def _recurrent(old: Stack) -> nn.Module:
    """Return torch's layers, called for the hidden states only."""
    kind = nn.LSTM if isinstance(old.kind, type(LSTM)) else nn.GRU
    made = kind(
        old.features,
        old.hidden,
        old.layers,
        bias="bias_ih" in old.tensors,
        batch_first=True,
        dropout=old.drops[0].p if len(old.drops) else 0.0,
        bidirectional=len(old.ends) == 2,
    )
    made.load_state_dict(old.state_dict())
    _frozen_as(made, old)
    return Recurrent(made)


def _frozen_as(new: nn.Module, old: nn.Module) -> nn.Module:
    """Set ``requires_grad`` of ``new`` as in ``old``, by name, and return ``new``."""
    for name, parameter in old.named_parameters():
        new.get_parameter(name).requires_grad_(parameter.requires_grad)
    return new
