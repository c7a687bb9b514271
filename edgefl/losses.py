"""Losses as objects, with their options: ``Huber(delta=2.0)``; a function of your own by :func:`own_loss`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from edgefl.contract.choice import LossChoice, define_plain
from edgefl.models import losses
from edgefl.models.losses.loss import Loss
from edgefl.models.losses.own import own_loss

CrossEntropy = define_plain(LossChoice, "cross_entropy", "CrossEntropy", losses.CrossEntropy)
SequenceCrossEntropy = define_plain(
    LossChoice, "sequence_cross_entropy", "SequenceCrossEntropy", losses.SequenceCrossEntropy
)
CausalLM = define_plain(LossChoice, "causal_lm", "CausalLM", losses.CausalLM)
BinaryCrossEntropy = define_plain(
    LossChoice, "binary_cross_entropy", "BinaryCrossEntropy", losses.BinaryCrossEntropy
)
SquaredError = define_plain(LossChoice, "squared_error", "SquaredError", losses.SquaredError)
AbsoluteError = define_plain(LossChoice, "absolute_error", "AbsoluteError", losses.AbsoluteError)
Huber = define_plain(LossChoice, "huber", "Huber", losses.Huber)
Quantile = define_plain(LossChoice, "quantile", "Quantile", losses.Quantile)
InfoNCE = define_plain(LossChoice, "info_nce", "InfoNCE", losses.InfoNCE)
NTXent = define_plain(LossChoice, "nt_xent", "NTXent", losses.NTXent)
CTC = define_plain(LossChoice, "ctc", "CTC", losses.CTC)
ModelLoss = define_plain(LossChoice, "model", "ModelLoss", losses.ModelLoss)

LossLike = LossChoice | Loss | str | Callable[..., Any]
"""A choice such as ``edgefl.losses.Huber(delta=2.0)``, a loss, its name, or a function ``(out, y)`` of your own."""

__all__ = [
    "CTC",
    "AbsoluteError",
    "BinaryCrossEntropy",
    "CausalLM",
    "CrossEntropy",
    "Huber",
    "InfoNCE",
    "LossLike",
    "ModelLoss",
    "NTXent",
    "Quantile",
    "SequenceCrossEntropy",
    "SquaredError",
    "own_loss",
]
