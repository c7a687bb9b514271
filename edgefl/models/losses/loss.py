"""Interface of a loss: one value per sample, the form of a label, and the metrics of a model.

One value per sample allows to average a batch in training and to mask it in evaluation. A loss that reduces a batch
itself is a :class:`WholeBatch`. A loss also defines the label port of every algorithm: its shape, dtype and bounds.
Features of only some losses are protocols of their own: :class:`Weighted`, :class:`OfBatch`, :class:`OfClasses`,
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
    """Loss of a model's output ``out`` (B, ...) and labels ``y``, which have the form of :meth:`label`."""

    def each(self, out: Tensor, y: Tensor) -> Tensor:
        """Return the loss of each sample, (B,)."""

    def correct(self, out: Tensor, y: Tensor) -> Tensor:
        """Return the share of each sample that is right, (B,) float32 from 0 to 1; its mean is the accuracy."""

    def label(self, out: TensorSpec) -> TensorSpec:
        """Return one sample's label for an output of one sample ``out``; raise ModelError if the loss cannot read it."""


@runtime_checkable
class Weighted(Protocol):
    """Loss that weighs samples in their batch, such as by the number of tokens that count."""

    def weight(self, y: Tensor) -> Tensor | None:
        """Return the weight of each sample in the mean of its batch, (B,), 0 or more; None for equal weights."""


@runtime_checkable
class WholeBatch(Protocol):
    """Loss with a training value of its own for a whole batch, beside the values of single samples for evaluation."""

    def batch_loss(self, out: Tensor, y: Tensor) -> Tensor:
        """Return the value that training minimises, ()."""

    def is_separable(self, out: TensorSpec) -> bool:
        """Return True if that value is the mean of :meth:`Loss.each` for outputs of one sample ``out``."""


@runtime_checkable
class OfBatch(Protocol):
    """Loss that compares the samples of a batch with each other."""

    def among(self, mask: Tensor) -> Loss:
        """Return the loss that compares samples only with rows whose ``mask`` (B,) is 1."""


@runtime_checkable
class OfClasses(Protocol):
    """Loss whose labels are class numbers and whose output holds their logits."""

    def logits(self, out: Tensor) -> Tensor:
        """Return one logit per class, in the last dimension."""

    def output(self, logits: Tensor) -> Tensor:
        """Return the output that has these logits: the inverse of :meth:`logits`."""


@runtime_checkable
class OfRounds(Protocol):
    """Loss with scalars that the server announces for each round."""

    @property
    def scalars(self) -> tuple[str, ...]:
        """Names of the scalars, below ``hyper``."""

    def at(self, scalars: Mapping[str, Tensor]) -> Loss:
        """Return the loss of a round with these scalars, each ()."""


@runtime_checkable
class Measured(Protocol):
    """Loss with metrics of its own (:mod:`edgefl.wire.metrics`)."""

    def metrics(self, out: TensorSpec) -> tuple[str, ...]:
        """Return the names of the metrics for an output of one sample ``out``, the main one first; () for only the loss."""

    def sums(self, out: Tensor, y: Tensor) -> Tensors:
        """Return the terms of the metrics beside loss and ``correct``, per sample, (B,) or (B, n) float32.

        They are summed over rows, batches and devices.
        """


def sample_weights(loss: Loss, y: Tensor) -> Tensor | None:
    """Return the weight of each sample in its batch, (B,); None for equal weights."""
    return loss.weight(y) if isinstance(loss, Weighted) else None


def batch_mean(loss: Loss, values: Tensor, y: Tensor) -> Tensor:
    """Return the weighted mean () of ``values`` (B,) of samples with labels ``y``; 0 if all weights are 0."""
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
    """Raise ModelError if ``loss`` reduces a batch itself, because ``what`` needs a loss per sample."""
    if not is_separable(loss, out):
        name = getattr(loss, "name", type(loss).__name__)
        raise ModelError(
            f"{what} needs the loss of each sample, and the loss {name!r} reduces a batch itself: expected one value per "
            'sample, (B,), that no other sample changes; return it (reduction="none" in torch), take a loss of edgefl '
            "(`edgefl ls losses`), or another algorithm, such as sgd",
            loss=name,
        )


def among(loss: Loss, mask: Tensor) -> Loss:
    """Return ``loss`` for a batch of which only rows whose ``mask`` (B,) is 1 count."""
    return loss.among(mask) if isinstance(loss, OfBatch) else loss


def metrics_of(loss: Loss, out: TensorSpec) -> tuple[str, ...]:
    """Return the names of a loss's metrics, the main one first; accuracy by default."""
    return loss.metrics(out) if isinstance(loss, Measured) else ("accuracy",)


def sums_of(loss: Loss, out: Tensor, y: Tensor, mask: Tensor) -> Tensors:
    """Return the terms of a batch's metrics, summed over the rows whose ``mask`` (B,) is 1.

    Returns:
        ``loss_sum`` and ``correct``, (), and ``count``, the number of those rows. With weighted samples also ``weight``,
        ``weighted_loss`` and ``weighted_correct``. The loss's own sums.
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
    """Return the sum over the rows that count, () or (n,), of (B,) or (B, n)."""
    return (each * mask).sum() if each.dim() == 1 else (each * mask.unsqueeze(1)).sum(dim=0)


def without_absent(loss: OfClasses, out: Tensor, counts: Tensor) -> Tensor:
    """Return ``out`` with logits 0 for classes that no local sample has, so that they get no gradient (HeteroFL).

    Args:
        loss: the loss that reads the output.
        out: a model's output.
        counts: number of local samples of each class, (classes,).
    """
    logits = loss.logits(out)
    return loss.output(torch.where(counts > 0, logits, torch.zeros_like(logits)))


def negative_log_likelihood(logits: Tensor, y: Tensor, smoothing: float, dim: int = -1) -> Tensor:
    """Return the cross-entropy over the classes in ``dim`` of logits (..., C, ...), y without that dimension, in 0..C-1.

    The label's entry is gathered (its gradient scattered): at most two thirds of the time of selecting it by
    comparison, in ONNX Runtime, at any number of classes from 10 to 33,278.
    """
    logp = torch.log_softmax(logits, dim=dim)
    chosen = -logp.gather(dim, y.unsqueeze(dim)).squeeze(dim)
    return chosen if smoothing == 0.0 else (1 - smoothing) * chosen - smoothing * logp.mean(dim=dim)


def class_labels(y: Tensor, ignored: int | None) -> Tensor:
    """Return ``y`` with 0 for ``ignored`` labels, because these need not be classes, and a gather must not see them."""
    return y if ignored is None else torch.where(y != ignored, y, torch.zeros_like(y))


def counted_labels(y: Tensor, ignored: int | None) -> Tensor | None:
    """Return 1.0 for each label that counts, float32 like ``y``, and 0.0 for others; None if all count."""
    return None if ignored is None else (y != ignored).to(torch.float32)


def per_sample(values: Tensor, counted: Tensor | None = None) -> Tensor:
    """Return the mean of each sample, (B,), over the entries of ``values`` (B, ...) that count; 0 if none counts."""
    if values.dim() == 1 and counted is None:
        return values
    flat = values.reshape(len(values), -1)
    if counted is None:
        return flat.mean(dim=1)
    mask = counted.reshape(flat.shape).to(flat.dtype)
    return (flat * mask).sum(dim=1) / mask.sum(dim=1).clamp_min(1.0)


def check_smoothing(smoothing: float) -> None:
    """Raise ModelError for a label smoothing outside [0, 1]."""
    if not 0.0 <= smoothing <= 1.0:
        raise ModelError(f"label_smoothing lies in [0, 1], found {smoothing}", label_smoothing=smoothing)


def output_error(loss: Loss, out: TensorSpec, expected: str) -> ModelError:
    """Return the error of a loss that reads outputs ``expected``, and not ``out``."""
    return ModelError(
        f"{type(loss).__name__} reads {expected} per sample, the model gives {out.shape}: give the model the loss that fits "
        "its output (`edgefl ls losses`)",
        found=out.shape,
    )
