"""A model as its author would have written it for torch alone: the fair other side of a comparison.

Our layers make randomness an input and recurrences traceable, which torch users need not; here they are torch's own
again: ``nn.BatchNorm``, ``nn.Dropout``, ``nn.LSTM``, ``nn.GRU``, and the losses of ``torch.nn.functional``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from edgefl.models.layers import BatchNorm, Dropout
from edgefl.models.loss import BinaryCrossEntropy, CrossEntropy, Loss, SequenceCrossEntropy, SquaredError
from edgefl.models.recurrent import LSTM, BiLstm, Stack

IGNORE_NOTHING = -100


class AnyBatchNorm(nn.modules.batchnorm._BatchNorm):
    """``nn.BatchNorm1d``, ``2d`` and ``3d``, which differ in the shapes they refuse."""

    def _check_input_dim(self, input: Tensor) -> None:
        """Every shape is fine."""


class Recurrent(nn.Module):
    """``nn.LSTM`` or ``nn.GRU`` for its hidden states, (B, T, E) -> (B, T, D*H)."""

    def __init__(self, layers: nn.LSTM | nn.GRU) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.layers(x)[0])


class LastOfBoth(nn.Module):
    """A bidirectional ``nn.LSTM`` for the last hidden states of its directions, (B, T, E) -> (B, 2H)."""

    def __init__(self, features: int, hidden: int, rate: float) -> None:
        super().__init__()
        self.layers = nn.LSTM(features, hidden, batch_first=True, bidirectional=True)
        self.drop = nn.Dropout(rate)

    def forward(self, x: Tensor) -> Tensor:
        _, (h, _) = self.layers(self.drop(x))
        return cast(Tensor, self.drop(torch.cat((h[0], h[1]), dim=1)))


def as_written(module: nn.Sequential) -> nn.Sequential:
    """A copy in training mode with torch's own layers in place of ours; recurrent layers get new values."""
    return cast(nn.Sequential, _replaced(copy.deepcopy(module))).train()


def _replaced(module: nn.Module) -> nn.Module:
    if isinstance(module, BatchNorm):
        return _batch_norm(module)
    if isinstance(module, Dropout):
        return nn.Dropout(module.rate)
    if isinstance(module, BiLstm) and module.skip == 0:
        return LastOfBoth(module.features, module.hidden, module.drop_in.rate)
    if isinstance(module, Stack):
        return _recurrent(module)
    for name, child in list(module.named_children()):
        setattr(module, name, _replaced(child))
    return module


def _batch_norm(old: BatchNorm) -> nn.Module:
    tracked = old.mode == "global"
    new = AnyBatchNorm(old.channels, old.eps, 1 - old.keep, old.weight is not None, tracked)
    new.load_state_dict(old.state_dict(), strict=False)  # torch's has a counter more
    return new


def _recurrent(old: Stack) -> nn.Module:
    kind = nn.LSTM if old.kind == LSTM else nn.GRU
    made = kind(
        old.features,
        old.hidden,
        old.layers,
        bias="bias_ih" in old.tensors,
        batch_first=True,
        dropout=old.drops[0].rate if len(old.drops) else 0.0,
        bidirectional=len(old.ends) == 2,
    )
    return Recurrent(made)


def loss_as_written(loss: Loss) -> Callable[[Tensor, Tensor], Tensor]:
    """The mean loss of a batch by ``torch.nn.functional``; a kind of loss that is unknown here is called as it is."""
    match loss:
        case CrossEntropy(label_smoothing=smoothing):
            return lambda out, y: (
                F.cross_entropy(out, y, label_smoothing=smoothing)
                if out.shape[1] > 1
                else F.binary_cross_entropy_with_logits(out.squeeze(1), y.to(out.dtype))
            )
        case SequenceCrossEntropy(ignore_index=ignored, label_smoothing=smoothing):
            index = IGNORE_NOTHING if ignored is None else ignored
            return lambda out, y: F.cross_entropy(
                out.flatten(0, 1), y.flatten(), ignore_index=index, label_smoothing=smoothing
            )
        case BinaryCrossEntropy():
            return F.binary_cross_entropy_with_logits
        case SquaredError():
            return F.mse_loss
    return lambda out, y: loss.each(out, y).mean()
