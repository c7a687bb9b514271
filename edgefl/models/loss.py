"""What training minimises, and what a label is: losses per sample, on whatever a model gives.

A loss is one value per sample, so that a batch can be averaged in training and masked in evaluation. It also decides
the label port of every program: its shape, its dtype and which random labels are valid.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn import functional as F

from edgefl.contract.tensors import TensorSpec
from edgefl.wire.errors import ModelError


class Loss(Protocol):
    """One kind of loss. ``out`` is a model's output (B, ...), ``y`` the labels as :meth:`label` says."""

    def each(self, out: Tensor, y: Tensor) -> Tensor:
        """The loss per sample, (B,)."""
        ...

    def correct(self, out: Tensor, y: Tensor) -> Tensor:
        """How right each sample is, (B,) float32 from 0 to 1; its mean is what people call accuracy."""
        ...

    def label(self, out: TensorSpec) -> TensorSpec:
        """One sample's label for a model whose output has one sample ``out``; ModelError if the loss cannot read it."""
        ...


@runtime_checkable
class OfClasses(Protocol):
    """A loss whose labels are class numbers and whose output holds their logits."""

    def logits(self, out: Tensor) -> Tensor:
        """One logit per class, in the last dimension."""
        ...


@runtime_checkable
class OfRounds(Protocol):
    """A loss with scalars that the server announces for each round."""

    @property
    def scalars(self) -> tuple[str, ...]:
        """Their names, below ``hyper``."""
        ...

    def at(self, scalars: Mapping[str, Tensor]) -> Loss:
        """The loss of a round with these scalars, each ()."""
        ...


def without_absent(loss: OfClasses, out: Tensor, counts: Tensor) -> Tensor:
    """HeteroFL's masked cross-entropy: logits of classes that no local sample has become 0, so that they get no gradient.

    ``out`` is a model's output, ``counts`` (classes,) the local samples of each class; result (B, ..., classes), which
    ``loss`` reads like ``out``.
    """
    logits = loss.logits(out)
    return torch.where(counts > 0, logits, torch.zeros_like(logits))


@dataclass(frozen=True)
class CrossEntropy:
    """-log softmax(z)[y] for logits (B, C) and one class number per sample, y (B,) int64.

    A single logit z stands for the two classes (0, z), whose cross-entropy is that of sigmoid(z).
    With ``label_smoothing`` e: ``(1 - e) * -log p[y] + e * mean_c(-log p[c])``, as torch.
    """

    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        _check_smoothing(self.label_smoothing)

    def each(self, out: Tensor, y: Tensor) -> Tensor:
        return _negative_log_likelihood(self.logits(out), y, self.label_smoothing)

    def correct(self, out: Tensor, y: Tensor) -> Tensor:
        return _hits(self.logits(out), y)

    def logits(self, out: Tensor) -> Tensor:
        return torch.cat((torch.zeros_like(out), out), dim=1) if out.shape[1] == 1 else out

    def label(self, out: TensorSpec) -> TensorSpec:
        _check_rank(self, out, 1, "(classes,)")
        return TensorSpec((), torch.int64, max(2, out.shape[0]))


@dataclass(frozen=True)
class SequenceCrossEntropy:
    """Cross-entropy of every position of a sequence: logits (B, T, V), y (B, T) int64, mean over the T tokens.

    Tokens labelled ``ignore_index`` count neither as loss nor as right or wrong; a sample's mean is over the others,
    and a sample without any has loss 0. All samples weigh the same. Devices check that labels lie in 0..V-1, so for
    them ``ignore_index`` is the number of a padding token. ``label_smoothing`` as in :class:`CrossEntropy`.
    """

    ignore_index: int | None = None
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        _check_smoothing(self.label_smoothing)

    def each(self, out: Tensor, y: Tensor) -> Tensor:
        if self.ignore_index is None:
            return _negative_log_likelihood(out, y, self.label_smoothing).mean(dim=1)
        # An ignored label need not be a class, and the gather must not see it.
        named = torch.where(y != self.ignore_index, y, torch.zeros_like(y))
        return self._mean(_negative_log_likelihood(out, named, self.label_smoothing), y)

    def correct(self, out: Tensor, y: Tensor) -> Tensor:
        return self._mean(_hits(out, y), y)

    def label(self, out: TensorSpec) -> TensorSpec:
        _check_rank(self, out, 2, "(tokens, vocabulary)")
        return TensorSpec(out.shape[:1], torch.int64, out.shape[1])

    def logits(self, out: Tensor) -> Tensor:
        return out

    def _mean(self, values: Tensor, y: Tensor) -> Tensor:
        if self.ignore_index is None:
            return values.mean(dim=1)
        mask = (y != self.ignore_index).to(values.dtype)
        return (values * mask).sum(dim=1) / mask.sum(dim=1).clamp_min(1.0)


@dataclass(frozen=True)
class BinaryCrossEntropy:
    """Independent yes/no answers: logits z (B, *S), y (B, *S) float32 in [0, 1], mean over a sample's entries.

    ``max(z, 0) - z*y + log(1 + exp(-|z|))``. An entry is right where z > 0 exactly if y > 1/2.
    """

    def each(self, out: Tensor, y: Tensor) -> Tensor:
        return _per_sample(F.binary_cross_entropy_with_logits(out, y, reduction="none"))

    def correct(self, out: Tensor, y: Tensor) -> Tensor:
        return _per_sample(((out > 0.0) == (y > 0.5)).to(torch.float32))

    def label(self, out: TensorSpec) -> TensorSpec:
        return TensorSpec(out.shape, torch.float32, 2)


@dataclass(frozen=True)
class SquaredError:
    """Regression: (out - y)^2 for out and y (B, *S) float32, mean over a sample's entries.

    There is no right or wrong; an entry counts as right within ``tolerance`` of its label.
    """

    tolerance: float = 0.5

    def each(self, out: Tensor, y: Tensor) -> Tensor:
        return _per_sample((out - y).square())

    def correct(self, out: Tensor, y: Tensor) -> Tensor:
        return _per_sample(((out - y).abs() <= self.tolerance).to(torch.float32))

    def label(self, out: TensorSpec) -> TensorSpec:
        return TensorSpec(out.shape, torch.float32)


def _negative_log_likelihood(logits: Tensor, y: Tensor, smoothing: float) -> Tensor:
    """Cross-entropy over the last dimension: logits (..., C), y (...) int64 in 0..C-1, result (...).

    The label's entry is gathered (its gradient scattered): at most two thirds of the time of selecting it by
    comparison, in ONNX Runtime, at any number of classes from 10 to 33,278.
    """
    logp = F.log_softmax(logits, dim=-1)
    chosen = -logp.gather(-1, y.unsqueeze(-1)).squeeze(-1)
    return chosen if smoothing == 0.0 else (1 - smoothing) * chosen - smoothing * logp.mean(dim=-1)


def _hits(logits: Tensor, y: Tensor) -> Tensor:
    return (logits.argmax(dim=-1) == y).to(torch.float32)


def _per_sample(values: Tensor) -> Tensor:
    return values.flatten(1).mean(dim=1) if values.dim() > 1 else values


def _check_smoothing(smoothing: float) -> None:
    if not 0.0 <= smoothing <= 1.0:
        raise ModelError(f"label_smoothing lies in [0, 1], found {smoothing}", label_smoothing=smoothing)


def _check_rank(loss: Loss, out: TensorSpec, rank: int, wanted: str) -> None:
    if len(out.shape) != rank:
        raise ModelError(
            f"{type(loss).__name__} reads {wanted} logits per sample, the model gives {out.shape}: give the model "
            "the loss that fits its output (edgefl.models.loss)",
            found=out.shape,
        )


CROSS_ENTROPY = CrossEntropy()
"""What a model is trained with unless it says otherwise."""
