"""Several labels at once: independent yes/no answers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from edgefl.contract.tensors import Tensors, TensorSpec
from edgefl.models.losses.classes import confusion
from edgefl.models.losses.loss import per_sample


@dataclass(frozen=True)
class BinaryCrossEntropy:
    """Several labels at once: independent yes/no answers.

    Logits z (B, *S), y (B, *S) float32 in [0, 1], mean over a sample's entries of
    ``max(z, 0) - z*y + log(1 + exp(-|z|))``. An entry is right where z > 0 exactly if y > 1/2. The first dimension of S
    holds the labels, each with an F1 of its own; others are places.
    """

    def each(self, out: Tensor, y: Tensor) -> Tensor:
        return per_sample(F.binary_cross_entropy_with_logits(out, y, reduction="none"))

    def correct(self, out: Tensor, y: Tensor) -> Tensor:
        return per_sample(((out > 0.0) == (y > 0.5)).to(torch.float32))

    def label(self, out: TensorSpec) -> TensorSpec:
        return TensorSpec(out.shape, torch.float32, 2)

    def metrics(self, out: TensorSpec) -> tuple[str, ...]:
        return ("accuracy", "f1")

    def sums(self, out: Tensor, y: Tensor) -> Tensors:
        labels = out.shape[1] if out.dim() > 1 else 1
        found, true = (each.reshape(len(each), labels, -1).movedim(1, -1) for each in (out > 0.0, y > 0.5))
        return confusion(found, true)
