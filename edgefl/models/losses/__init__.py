"""Losses: one value per sample, the form of a label, and the metrics of the task."""

from __future__ import annotations

from edgefl.models.losses.catalog import LOSSES, build
from edgefl.models.losses.classification import (
    CROSS_ENTROPY,
    BinaryCrossEntropy,
    CausalLM,
    CrossEntropy,
    SequenceCrossEntropy,
)
from edgefl.models.losses.contrastive import InfoNCE, NTXent
from edgefl.models.losses.ctc import CTC
from edgefl.models.losses.loss import Loss
from edgefl.models.losses.own import ModelLoss, OwnLoss, own_loss
from edgefl.models.losses.regression import AbsoluteError, Huber, Quantile, SquaredError

__all__ = [
    "CROSS_ENTROPY",
    "CTC",
    "LOSSES",
    "AbsoluteError",
    "BinaryCrossEntropy",
    "CausalLM",
    "CrossEntropy",
    "Huber",
    "InfoNCE",
    "Loss",
    "ModelLoss",
    "NTXent",
    "OwnLoss",
    "Quantile",
    "SequenceCrossEntropy",
    "SquaredError",
    "build",
    "own_loss",
]
