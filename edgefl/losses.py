"""Losses as objects, with their options: ``Huber(delta=2.0)``; a function of your own by :func:`own_loss`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from edgefl.contract.choice import LossChoice, built_alone
from edgefl.models import losses
from edgefl.models.losses.loss import Loss
from edgefl.models.losses.own import own_loss

CrossEntropy = built_alone(LossChoice, "cross_entropy", "CrossEntropy", losses.CrossEntropy)
SequenceCrossEntropy = built_alone(
    LossChoice, "sequence_cross_entropy", "SequenceCrossEntropy", losses.SequenceCrossEntropy
)
CausalLM = built_alone(LossChoice, "causal_lm", "CausalLM", losses.CausalLM)
BinaryCrossEntropy = built_alone(
    LossChoice, "binary_cross_entropy", "BinaryCrossEntropy", losses.BinaryCrossEntropy
)
SquaredError = built_alone(LossChoice, "squared_error", "SquaredError", losses.SquaredError)
AbsoluteError = built_alone(LossChoice, "absolute_error", "AbsoluteError", losses.AbsoluteError)
Huber = built_alone(LossChoice, "huber", "Huber", losses.Huber)
Quantile = built_alone(LossChoice, "quantile", "Quantile", losses.Quantile)
InfoNCE = built_alone(LossChoice, "info_nce", "InfoNCE", losses.InfoNCE)
NTXent = built_alone(LossChoice, "nt_xent", "NTXent", losses.NTXent)
CTC = built_alone(LossChoice, "ctc", "CTC", losses.CTC)
ModelLoss = built_alone(LossChoice, "model", "ModelLoss", losses.ModelLoss)

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
