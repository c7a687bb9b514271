"""What training minimises, and what a label is: losses per sample, on whatever a model gives, and the metrics to match."""

from __future__ import annotations

from edgefl.models.losses.catalog import LOSSES, build
from edgefl.models.losses.classes import CROSS_ENTROPY, BinaryCrossEntropy, CrossEntropy
from edgefl.models.losses.contrastive import InfoNCE, NTXent
from edgefl.models.losses.ctc import CTC
from edgefl.models.losses.loss import Loss
from edgefl.models.losses.own import OwnLoss, own_loss
from edgefl.models.losses.regression import AbsoluteError, Huber, Quantile, SquaredError
from edgefl.models.losses.returned import ModelLoss
from edgefl.models.losses.sequence import CausalLM, SequenceCrossEntropy

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
