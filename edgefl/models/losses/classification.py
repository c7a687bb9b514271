"""Losses for labels that are classes: of a sample, of its pixels or tokens, or several at once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from edgefl.contract.tensors import Tensors, TensorSpec
from edgefl.models.losses.loss import (
    check_smoothing,
    class_labels,
    counted_labels,
    negative_log_likelihood,
    output_error,
    per_sample,
)


@dataclass(frozen=True)
class CrossEntropy:
    """Cross-entropy, for one class per sample or one per pixel.

    ``-log softmax(z)[y]`` for logits z (B, C) and class numbers y (B,) int64; or for logits (B, C, *S) and a class
    number per position, y (B, *S), as in segmentation. A single logit z means the logits (0, z) of two classes, hence
    the cross-entropy of sigmoid(z).

    Args:
        label_smoothing: e in ``(1 - e) * -log p[y] + e * mean_c(-log p[c])``, as in torch; in [0, 1].
        ignore_index: Label that has no part in the loss and the metrics. It need not be a class (-100, or 255 for the
            border of an object). A batch's mean is over the other labels, as in torch. None: all labels count.

    Raises:
        ModelError: ``label_smoothing`` is out of range.
    """

    label_smoothing: float = 0.0
    ignore_index: int | None = None

    def __post_init__(self) -> None:
        check_smoothing(self.label_smoothing)

    def each(self, out: Tensor, y: Tensor) -> Tensor:
        logits, ignored = _pair(out), self.ignore_index
        values = negative_log_likelihood(logits, class_labels(y, ignored), self.label_smoothing, dim=1)
        return per_sample(values, counted_labels(y, ignored))

    def correct(self, out: Tensor, y: Tensor) -> Tensor:
        hits = (_pair(out).argmax(dim=1) == y).to(torch.float32)
        return per_sample(hits, counted_labels(y, self.ignore_index))

    def weight(self, y: Tensor) -> Tensor | None:
        counted = counted_labels(y, self.ignore_index)
        return None if counted is None else counted.reshape(len(y), -1).sum(dim=1)

    def logits(self, out: Tensor) -> Tensor:
        return _pair(out) if out.dim() == 2 else _pair(out).movedim(1, -1)

    def output(self, logits: Tensor) -> Tensor:
        return logits if logits.dim() == 2 else logits.movedim(-1, 1)

    def label(self, out: TensorSpec) -> TensorSpec:
        if not out.shape:
            raise output_error(self, out, "(classes,) or (classes, ...) logits")
        return TensorSpec(out.shape[1:], torch.int64, max(2, out.shape[0]), self.ignore_index)

    def metrics(self, out: TensorSpec) -> tuple[str, ...]:
        return ("accuracy", "f1") if len(out.shape) == 1 else ("accuracy", "iou", "f1")

    def sums(self, out: Tensor, y: Tensor) -> Tensors:
        """Return the counts of :func:`confusion` for each class, (B, C).

        For two classes per sample, only for the second: (B, 1).
        """
        logits = _pair(out)
        classes = torch.arange(logits.shape[1], device=y.device)
        first = 1 if logits.shape[1:] == (2,) else 0
        counted = counted_labels(y, self.ignore_index)
        return confusion(
            logits.argmax(dim=1).unsqueeze(-1) == classes[first:], y.unsqueeze(-1) == classes[first:], counted
        )


def confusion(predicted: Tensor, actual: Tensor, counted: Tensor | None = None) -> Tensors:
    """Return counts per sample and class, each float32 (B, C).

    Args:
        predicted: True where a class is predicted, bool (B, *S, C).
        actual: True where it is the label, bool (B, *S, C).
        counted: 1 at the positions that count, float32 (B, *S). None: all.

    Returns:
        True positives ``tp``, false positives ``fp``, and false negatives ``fn``.
    """
    rows, classes = predicted.shape[0], predicted.shape[-1]
    positives, truths = (each.to(torch.float32).reshape(rows, -1, classes) for each in (predicted, actual))
    if counted is not None:
        weight = counted.reshape(rows, -1, 1)
        positives, truths = positives * weight, truths * weight
    hits = (positives * truths).sum(dim=1)
    return {"tp": hits, "fp": positives.sum(dim=1) - hits, "fn": truths.sum(dim=1) - hits}


def _pair(out: Tensor) -> Tensor:
    """Return logits (B, C, ...) of at least two classes. A single logit z becomes (0, z)."""
    return torch.cat((torch.zeros_like(out), out), dim=1) if out.shape[1] == 1 else out


CROSS_ENTROPY = CrossEntropy()
"""Default loss of a classifier."""


@dataclass(frozen=True)
class BinaryCrossEntropy:
    """Binary cross-entropy, for several independent yes/no labels per sample.

    Logits z (B, *S), y (B, *S) float32 in [0, 1], mean over a sample's entries of ``max(z, 0) - z*y + log(1 +
    exp(-|z|))``. An entry is correct if z > 0 and y > 1/2 agree. The first dimension of S is the label, and each label
    has its own F1; further dimensions are positions.
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
        predicted, actual = (
            each.reshape(len(each), labels, -1).movedim(1, -1) for each in (out > 0.0, y > 0.5)
        )
        return confusion(predicted, actual)


_READS = "(tokens, vocabulary) logits"


@dataclass(frozen=True)
class SequenceCrossEntropy:
    """Cross-entropy, for one class per token of a sequence.

    Logits (B, T, V), y (B, T) int64, mean over the tokens.

    Args:
        ignore_index: Label of tokens that have no part in the loss and the metrics (-100, or the number of a padding
            token). A batch's mean is over the other tokens, as in torch. None: all tokens count.
        label_smoothing: e in ``(1 - e) * -log p[y] + e * mean_c(-log p[c])``, as in torch; in [0, 1].

    Raises:
        ModelError: ``label_smoothing`` is out of range.
    """

    ignore_index: int | None = None
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        check_smoothing(self.label_smoothing)

    def each(self, out: Tensor, y: Tensor) -> Tensor:
        values = negative_log_likelihood(out, class_labels(y, self.ignore_index), self.label_smoothing)
        return per_sample(values, counted_labels(y, self.ignore_index))

    def correct(self, out: Tensor, y: Tensor) -> Tensor:
        hits = (out.argmax(dim=-1) == y).to(torch.float32)
        return per_sample(hits, counted_labels(y, self.ignore_index))

    def weight(self, y: Tensor) -> Tensor | None:
        counted = counted_labels(y, self.ignore_index)
        return None if counted is None else counted.sum(dim=1)

    def logits(self, out: Tensor) -> Tensor:
        return out

    def output(self, logits: Tensor) -> Tensor:
        return logits

    def label(self, out: TensorSpec) -> TensorSpec:
        if len(out.shape) != 2:
            raise output_error(self, out, _READS)
        return TensorSpec(out.shape[:1], torch.int64, out.shape[1], self.ignore_index)

    def metrics(self, out: TensorSpec) -> tuple[str, ...]:
        return ("accuracy", "perplexity")

    def sums(self, out: Tensor, y: Tensor) -> Tensors:
        """Return two sums per sample, each (B,): ``nll`` and ``tokens``.

        ``nll`` is the negative log-likelihood without smoothing, for the perplexity, and ``tokens`` the number of
        tokens that count.
        """
        counted = counted_labels(y, self.ignore_index)
        if counted is None:
            counted = torch.ones_like(y, dtype=torch.float32)
        values = negative_log_likelihood(out, class_labels(y, self.ignore_index), 0.0)
        return {"nll": (values * counted).sum(dim=1), "tokens": counted.sum(dim=1)}


@dataclass(frozen=True)
class CausalLM(SequenceCrossEntropy):
    """Language modelling loss: cross-entropy of the next token of a sequence.

    Logits (B, T, V) at a token predict the next one, and labels y (B, T) int64 are the tokens themselves. The loss
    compares ``out[:, :-1]`` with ``y[:, 1:]``, mean over tokens.

    Args:
        ignore_index: Label that does not count, such as padding, or a prompt that is not learned. Label padding -100,
            or set this to the number of the padding token. None: all tokens count.
        label_smoothing: e in ``(1 - e) * -log p[y] + e * mean_c(-log p[c])``, as in torch; in [0, 1].
        shift: False if labels are the next tokens already.

    Raises:
        ModelError: ``label_smoothing`` is out of range.
    """

    ignore_index: int | None = -100
    label_smoothing: float = 0.0
    shift: bool = True

    def each(self, out: Tensor, y: Tensor) -> Tensor:
        return super().each(*self._pair(out, y))

    def correct(self, out: Tensor, y: Tensor) -> Tensor:
        return super().correct(*self._pair(out, y))

    def weight(self, y: Tensor) -> Tensor | None:
        return super().weight(y[:, 1:] if self.shift else y)

    def label(self, out: TensorSpec) -> TensorSpec:
        if len(out.shape) != 2 or out.shape[0] < 2:
            raise output_error(self, out, f"{_READS} of two tokens at least")
        return super().label(out)

    def metrics(self, out: TensorSpec) -> tuple[str, ...]:
        return ("perplexity", "accuracy")

    def sums(self, out: Tensor, y: Tensor) -> Tensors:
        return super().sums(*self._pair(out, y))

    def _pair(self, out: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return (logits, tokens that they predict), aligned: (B, T - 1, V) and (B, T - 1) if labels are the input
        tokens.
        """
        return (out[:, :-1], y[:, 1:]) if self.shift else (out, y)
