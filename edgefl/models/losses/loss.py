"""What a loss is: one value per sample, what a label looks like, and which numbers tell people how good a model is.

A loss is one value per sample, so that a batch can be averaged in training and masked in evaluation; one that reduces a
batch itself is :class:`WholeBatch`. It also decides the label port of every algorithm: its shape, its dtype and which labels
are valid. What only some losses have are protocols of their own: :class:`Weighted`, :class:`OfBatch`, :class:`OfClasses`,
:class:`OfRounds`, :class:`Measured`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from edgefl.contract.tensors import Tensors, TensorSpec
from edgefl.errors import ModelError


@runtime_checkable
class Loss(Protocol):
    """One kind of loss. ``out`` is a model's output (B, ...), ``y`` the labels as :meth:`label` says."""

    def each(self, out: Tensor, y: Tensor) -> Tensor:
        """The loss per sample, (B,)."""

    def correct(self, out: Tensor, y: Tensor) -> Tensor:
        """How right each sample is, (B,) float32 from 0 to 1; its mean is what people call accuracy."""

    def label(self, out: TensorSpec) -> TensorSpec:
        """One sample's label for a model whose output has one sample ``out``; ModelError if the loss cannot read it."""


@runtime_checkable
class Weighted(Protocol):
    """A loss whose samples weigh by what they hold: those with more tokens that count, the more."""

    def weight(self, y: Tensor) -> Tensor | None:
        """How much each sample weighs in the mean of its batch, (B,), 0 or more; None: all the same."""


@runtime_checkable
class WholeBatch(Protocol):
    """Loss with a training value of its own for a whole batch, beside the values of single samples for evaluation."""

    def batch_loss(self, out: Tensor, y: Tensor) -> Tensor:
        """Return the value that training minimises, ()."""

    def is_separable(self, out: TensorSpec) -> bool:
        """Return True if that value is the mean of :meth:`Loss.each` for outputs of one sample ``out``."""


@runtime_checkable
class OfBatch(Protocol):
    """A loss that compares the samples of a batch with each other."""

    def among(self, mask: Tensor) -> Loss:
        """The loss where only rows whose ``mask`` (B,) is 1 are there for the others."""


@runtime_checkable
class OfClasses(Protocol):
    """A loss whose labels are class numbers and whose output holds their logits."""

    def logits(self, out: Tensor) -> Tensor:
        """One logit per class, in the last dimension."""

    def output(self, logits: Tensor) -> Tensor:
        """The output that has these logits: the inverse of :meth:`logits`."""


@runtime_checkable
class OfRounds(Protocol):
    """A loss with scalars that the server announces for each round."""

    @property
    def scalars(self) -> tuple[str, ...]:
        """Their names, below ``hyper``."""

    def at(self, scalars: Mapping[str, Tensor]) -> Loss:
        """The loss of a round with these scalars, each ()."""


@runtime_checkable
class Measured(Protocol):
    """A loss that names its metrics (:mod:`edgefl.wire.metrics`)."""

    def metrics(self, out: TensorSpec) -> tuple[str, ...]:
        """Names of metrics for one sample's output ``out``, the one that people are shown first; () for none but the
        loss."""

    def sums(self, out: Tensor, y: Tensor) -> Tensors:
        """What the metrics are made of beside loss and ``correct``, per sample, (B,) or (B, n) float32: they add up over
        rows, batches and devices."""


def sample_weights(loss: Loss, y: Tensor) -> Tensor | None:
    """How much each sample weighs in its batch, (B,); None: all the same."""
    return loss.weight(y) if isinstance(loss, Weighted) else None


def batch_mean(loss: Loss, values: Tensor, y: Tensor) -> Tensor:
    """The mean () of ``values`` (B,) of samples with labels ``y``, as they weigh; 0 where none weighs anything."""
    weight = sample_weights(loss, y)
    if weight is None:
        return values.mean()
    return (values * weight).sum() / weight.sum().clamp_min(1.0)


def training_loss(loss: Loss, out: Tensor, y: Tensor) -> Tensor:
    """Return the value () that training minimises on a batch."""
    if isinstance(loss, WholeBatch):
        return loss.batch_loss(out, y)
    return batch_mean(loss, loss.each(out, y), y)


def is_separable(loss: Loss, out: TensorSpec) -> bool:
    """Return True if the training value is a mean of values per sample, so that single rows can be left out."""
    return not isinstance(loss, WholeBatch) or loss.is_separable(out)


def check_separable(loss: Loss, out: TensorSpec, what: str) -> None:
    """Raise ModelError if ``what`` needs a loss per sample and ``loss`` has but one of a whole batch."""
    if not is_separable(loss, out):
        name = getattr(loss, "name", type(loss).__name__)
        raise ModelError(
            f"{what} needs the loss of each sample, and the loss {name!r} reduces a batch itself: expected one value per "
            'sample, (B,), that no other sample changes; return it (reduction="none" in torch), take a loss of edgefl '
            "(`edgefl ls losses`), or another algorithm, such as sgd",
            loss=name,
        )


def among(loss: Loss, mask: Tensor) -> Loss:
    """``loss`` on a batch whose rows count where ``mask`` (B,) is 1."""
    return loss.among(mask) if isinstance(loss, OfBatch) else loss


def metrics_of(loss: Loss, out: TensorSpec) -> tuple[str, ...]:
    """Names of a loss's metrics, the one that people are shown first: accuracy where it does not say."""
    return loss.metrics(out) if isinstance(loss, Measured) else ("accuracy",)


def sums_of(loss: Loss, out: Tensor, y: Tensor, mask: Tensor) -> Tensors:
    """What the metrics of a masked batch are made of, summed over the rows whose ``mask`` (B,) is 1.

    ``loss_sum`` and ``correct``, (), and ``count``, the number of those rows; of a loss whose samples weigh differently
    also ``weight`` and what ``loss_sum`` and ``correct`` are with it, ``weighted_loss`` and ``weighted_correct``; and the
    loss's own sums.
    """
    present = among(loss, mask)
    losses, correct = present.each(out, y), present.correct(out, y)
    rows = {"loss_sum": losses, "correct": correct}
    weight = sample_weights(loss, y)
    own = present.sums(out, y) if isinstance(present, Measured) else {}
    if weight is not None:
        own = own | {"weight": weight, "weighted_loss": losses * weight, "weighted_correct": correct * weight}
    return {
        **{name: (each * mask).sum() for name, each in rows.items()},
        "count": mask.sum(),
        **{name: _summed(each, mask) for name, each in own.items()},
    }


def _summed(each: Tensor, mask: Tensor) -> Tensor:
    """The sum over the rows that count, () or (n,), of (B,) or (B, n)."""
    return (each * mask).sum() if each.dim() == 1 else (each * mask.unsqueeze(1)).sum(dim=0)


def without_absent(loss: OfClasses, out: Tensor, counts: Tensor) -> Tensor:
    """HeteroFL's masked cross-entropy: logits of classes that no local sample has become 0, so that they get no gradient.

    ``out`` is a model's output, ``counts`` (classes,) the local samples of each class; the result is an output that
    ``loss`` reads like ``out``.
    """
    logits = loss.logits(out)
    return loss.output(torch.where(counts > 0, logits, torch.zeros_like(logits)))


def negative_log_likelihood(logits: Tensor, y: Tensor, smoothing: float, dim: int = -1) -> Tensor:
    """Cross-entropy over the classes in ``dim``: logits (..., C, ...), y without that dimension, int64 in 0..C-1.

    The label's entry is gathered (its gradient scattered): at most two thirds of the time of selecting it by
    comparison, in ONNX Runtime, at any number of classes from 10 to 33,278.
    """
    logp = torch.log_softmax(logits, dim=dim)
    chosen = -logp.gather(dim, y.unsqueeze(dim)).squeeze(dim)
    return chosen if smoothing == 0.0 else (1 - smoothing) * chosen - smoothing * logp.mean(dim=dim)


def named(y: Tensor, ignored: int | None) -> Tensor:
    """Labels with 0 where they are ``ignored``: such a label need not be a class, and a gather must not see it."""
    return y if ignored is None else torch.where(y != ignored, y, torch.zeros_like(y))


def counting(y: Tensor, ignored: int | None) -> Tensor | None:
    """1.0 where a label counts, float32 like ``y``; None: all do."""
    return None if ignored is None else (y != ignored).to(torch.float32)


def per_sample(values: Tensor, counted: Tensor | None = None) -> Tensor:
    """The mean of each sample, (B,), of ``values`` (B, ...): over the entries that count; 0 where none does."""
    if values.dim() == 1 and counted is None:
        return values
    flat = values.reshape(len(values), -1)
    if counted is None:
        return flat.mean(dim=1)
    mask = counted.reshape(flat.shape).to(flat.dtype)
    return (flat * mask).sum(dim=1) / mask.sum(dim=1).clamp_min(1.0)


def check_smoothing(smoothing: float) -> None:
    """ModelError for a label smoothing outside [0, 1]."""
    if not 0.0 <= smoothing <= 1.0:
        raise ModelError(f"label_smoothing lies in [0, 1], found {smoothing}", label_smoothing=smoothing)


def cannot_read(loss: Loss, out: TensorSpec, wanted: str) -> ModelError:
    """The error of a loss that reads outputs ``wanted``, and not ``out``."""
    return ModelError(
        f"{type(loss).__name__} reads {wanted} per sample, the model gives {out.shape}: give the model the loss that fits "
        "its output (`edgefl ls losses`)",
        found=out.shape,
    )
