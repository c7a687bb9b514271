"""One class per sample, or one per pixel."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from edgefl.contract.tensors import Tensors, TensorSpec
from edgefl.models.losses.loss import (
    cannot_read,
    check_smoothing,
    counting,
    named,
    negative_log_likelihood,
    per_sample,
)


@dataclass(frozen=True)
class CrossEntropy:
    """One class per sample, or one per pixel.

    ``-log softmax(z)[y]`` for logits (B, C) and one class number per sample, y (B,) int64; for logits (B, C, *S) and one
    class number per place, y (B, *S), as segmentation has them.

    A single logit z stands for the two classes (0, z), whose cross-entropy is that of sigmoid(z).
    With ``label_smoothing`` e: ``(1 - e) * -log p[y] + e * mean_c(-log p[c])``, as torch.
    Labels ``ignore_index`` count neither as loss nor as right or wrong, and may lie outside the classes (-100, or 255 for
    the border of an object); a batch's mean is over the others, as torch's.
    """

    label_smoothing: float = 0.0
    ignore_index: int | None = None

    def __post_init__(self) -> None:
        check_smoothing(self.label_smoothing)

    def each(self, out: Tensor, y: Tensor) -> Tensor:
        logits, ignored = _pair(out), self.ignore_index
        values = negative_log_likelihood(logits, named(y, ignored), self.label_smoothing, dim=1)
        return per_sample(values, counting(y, ignored))

    def correct(self, out: Tensor, y: Tensor) -> Tensor:
        hits = (_pair(out).argmax(dim=1) == y).to(torch.float32)
        return per_sample(hits, counting(y, self.ignore_index))

    def weight(self, y: Tensor) -> Tensor | None:
        counted = counting(y, self.ignore_index)
        return None if counted is None else counted.reshape(len(y), -1).sum(dim=1)

    def logits(self, out: Tensor) -> Tensor:
        return _pair(out) if out.dim() == 2 else _pair(out).movedim(1, -1)

    def output(self, logits: Tensor) -> Tensor:
        return logits if logits.dim() == 2 else logits.movedim(-1, 1)

    def label(self, out: TensorSpec) -> TensorSpec:
        if not out.shape:
            raise cannot_read(self, out, "(classes,) or (classes, ...) logits")
        return TensorSpec(out.shape[1:], torch.int64, max(2, out.shape[0]), self.ignore_index)

    def metrics(self, out: TensorSpec) -> tuple[str, ...]:
        return ("accuracy", "f1") if len(out.shape) == 1 else ("accuracy", "iou", "f1")

    def sums(self, out: Tensor, y: Tensor) -> Tensors:
        """Of two classes of samples the second one is what is to be found, and the first one its absence."""
        logits = _pair(out)
        classes = torch.arange(logits.shape[1], device=y.device)
        first = 1 if logits.shape[1:] == (2,) else 0
        counted = counting(y, self.ignore_index)
        return confusion(
            logits.argmax(dim=1).unsqueeze(-1) == classes[first:], y.unsqueeze(-1) == classes[first:], counted
        )


def confusion(found: Tensor, true: Tensor, counted: Tensor | None = None) -> Tensors:
    """Hits ``tp``, false alarms ``fp`` and misses ``fn`` of each class, (B, C) float32, summed over the places of a sample:
    ``found`` and ``true`` are bool (B, *S, C), ``counted`` float32 (B, *S)."""
    rows, classes = found.shape[0], found.shape[-1]
    said, is_so = (each.to(torch.float32).reshape(rows, -1, classes) for each in (found, true))
    if counted is not None:
        weight = counted.reshape(rows, -1, 1)
        said, is_so = said * weight, is_so * weight
    hits = (said * is_so).sum(dim=1)
    return {"tp": hits, "fp": said.sum(dim=1) - hits, "fn": is_so.sum(dim=1) - hits}


def _pair(out: Tensor) -> Tensor:
    """Logits of two classes at least."""
    return torch.cat((torch.zeros_like(out), out), dim=1) if out.shape[1] == 1 else out


CROSS_ENTROPY = CrossEntropy()
"""What a model of classes is trained with unless it says otherwise."""


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
