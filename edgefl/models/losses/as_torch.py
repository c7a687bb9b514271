"""Losses as ``torch.nn.functional`` computes them, to compare training with torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from edgefl.models.losses.classification import (
    BinaryCrossEntropy,
    CausalLM,
    CrossEntropy,
    SequenceCrossEntropy,
)
from edgefl.models.losses.ctc import CTC
from edgefl.models.losses.loss import Loss, training_loss
from edgefl.models.losses.own import OwnLoss
from edgefl.models.losses.regression import AbsoluteError, Huber, SquaredError

_IGNORE_NOTHING = -100


def loss_as_torch(loss: Loss) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a function (outputs, labels) that computes the mean loss of a batch, a tensor (), with
    ``torch.nn.functional``.

    A loss that torch does not have is computed by edgefl's own code.
    """
    made: Callable[[Tensor, Tensor], Tensor] = partial(training_loss, loss)
    match loss:
        case CrossEntropy(label_smoothing=smoothing, ignore_index=ignored):
            made = partial(_cross_entropy, loss, _index(ignored), smoothing)
        case (
            SequenceCrossEntropy(ignore_index=ignored, label_smoothing=smoothing)
            | CausalLM(ignore_index=ignored, label_smoothing=smoothing)
        ):
            shift = isinstance(loss, CausalLM) and loss.shift
            made = partial(_tokens, _index(ignored), smoothing, shift)
        case BinaryCrossEntropy():
            made = F.binary_cross_entropy_with_logits
        case SquaredError():
            made = F.mse_loss
        case AbsoluteError():
            made = F.l1_loss
        case Huber(delta=delta):
            made = partial(F.huber_loss, delta=delta)
        case CTC(blank=blank):
            made = partial(_ctc, blank)
        case OwnLoss(function=function):
            made = partial(_mean_of, function)
    return made


def _index(ignored: int | None) -> int:
    return _IGNORE_NOTHING if ignored is None else ignored


def _cross_entropy(loss: CrossEntropy, ignored: int, smoothing: float, out: Tensor, y: Tensor) -> Tensor:
    if out.shape[1] > 1:
        return F.cross_entropy(out, y, ignore_index=ignored, label_smoothing=smoothing)
    if smoothing == 0.0 and loss.ignore_index is None:
        return F.binary_cross_entropy_with_logits(out.squeeze(1), y.to(out.dtype))
    return training_loss(loss, out, y)  # torch has no such loss of one logit


def _tokens(ignored: int, smoothing: float, shift: bool, out: Tensor, y: Tensor) -> Tensor:
    logits, tokens = (out[:, :-1], y[:, 1:]) if shift else (out, y)
    return F.cross_entropy(
        logits.flatten(0, 1), tokens.flatten(), ignore_index=ignored, label_smoothing=smoothing
    )


def _mean_of(function: Callable[[Tensor, Tensor], Tensor], out: Tensor, y: Tensor) -> Tensor:
    return function(out, y).mean()


def _ctc(blank: int, out: Tensor, y: Tensor) -> Tensor:
    times = torch.full((len(out),), out.shape[1])
    lengths = (y != blank).sum(dim=1)
    return F.ctc_loss(out.log_softmax(-1).transpose(0, 1), y, times, lengths, blank=blank, zero_infinity=True)
