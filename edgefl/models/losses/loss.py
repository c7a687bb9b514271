"""Interfaces of losses: one value per sample, the spec of a label, and the metrics of a model.

One value per sample can be averaged in training and masked in evaluation. A loss that reduces a batch itself is a
:class:`WholeBatchLoss`. A loss also defines the label port of every algorithm: its shape, dtype and bounds. Features
of only some losses are separate protocols: :class:`WeightedLoss`, :class:`CrossSampleLoss`,
:class:`ClassificationLoss`, :class:`RoundScalarsLoss`, :class:`LossWithMetrics`.
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
    """Interface of a loss of outputs ``out`` (B, ...) and labels ``y`` (B, ...), whose shape and dtype :meth:`label`
    defines.
    """

    def each(self, out: Tensor, y: Tensor) -> Tensor:
        """Return the loss of each sample, (B,)."""

    def correct(self, out: Tensor, y: Tensor) -> Tensor:
        """Return the share of each sample's predictions that are correct, (B,) float32 from 0 to 1.

        The mean over the samples is the accuracy.
        """

    def label(self, out: TensorSpec) -> TensorSpec:
        """Return the spec of one sample's label: shape, dtype, bound, and the label to ignore.

        Args:
            out: Spec of one output sample, without batch dimension.

        Raises:
            ModelError: The loss cannot read such an output.
        """


@runtime_checkable
class WeightedLoss(Protocol):
    """Interface of a loss that weights the samples of a batch, such as by the number of tokens that count."""

    def weight(self, y: Tensor) -> Tensor | None:
        """Return the weight of each sample in the mean of its batch, (B,), 0 or more. None: equal weights."""


@runtime_checkable
class WholeBatchLoss(Protocol):
    """Interface of a loss that computes the training value of a batch itself. :meth:`Loss.each` is then only for
    evaluation.
    """

    def batch_loss(self, out: Tensor, y: Tensor) -> Tensor:
        """Return the value that training minimises for a batch, of shape ()."""

    def is_separable(self, out: TensorSpec) -> bool:
        """Return True if :meth:`batch_loss` is a mean of independent values per sample.

        ``out`` is the spec of one output sample.
        """


@runtime_checkable
class CrossSampleLoss(Protocol):
    """Interface of a loss that compares the samples of a batch with each other."""

    def among(self, mask: Tensor) -> Loss:
        """Return a loss that compares samples only with those whose ``mask`` (B,) is 1."""


@runtime_checkable
class ClassificationLoss(Protocol):
    """Interface of a loss whose labels are class numbers and whose outputs are their logits."""

    def logits(self, out: Tensor) -> Tensor:
        """Return the logits of an output ``out``, with the classes in the last dimension."""

    def output(self, logits: Tensor) -> Tensor:
        """Return the output with these ``logits``, whose last dimension is the classes; the inverse of :meth:`logits`."""


@runtime_checkable
class RoundScalarsLoss(Protocol):
    """Interface of a loss with scalars that the server announces for each round."""

    @property
    def scalars(self) -> tuple[str, ...]:
        """Names of the scalars, without the prefix ``hyper.``."""

    def at(self, scalars: Mapping[str, Tensor]) -> Loss:
        """Return the loss with the scalars of a round, each of shape ()."""


@runtime_checkable
class LossWithMetrics(Protocol):
    """Interface of a loss that defines its own metrics. Their names and terms are in :mod:`edgefl.wire.metrics`."""

    def metrics(self, out: TensorSpec) -> tuple[str, ...]:
        """Return the names of the metrics besides the loss, the main one first. Empty: the loss is the only metric.

        ``out`` is the spec of one output sample.
        """

    def sums(self, out: Tensor, y: Tensor) -> Tensors:
        """Return values per sample that the metrics need in addition to loss and ``correct``, by name: (B,) or (B, n)
        float32.

        They are added over rows, batches and devices.
        """


def sample_weights(loss: Loss, y: Tensor) -> Tensor | None:
    """Return the weight of each sample in its batch, (B,), or None for equal weights."""
    return loss.weight(y) if isinstance(loss, WeightedLoss) else None


def batch_mean(loss: Loss, values: Tensor, y: Tensor) -> Tensor:
    """Return the weighted mean, of shape (), of a value per sample.

    Args:
        loss: Loss that defines the weights.
        values: Value of each sample (B,).
        y: Labels of the batch.

    Returns:
        The mean; 0 if all weights are 0.
    """
    weight = sample_weights(loss, y)
    if weight is None:
        return values.mean()
    return (values * weight).sum() / weight.sum().clamp_min(1.0)


def training_loss(loss: Loss, out: Tensor, y: Tensor) -> Tensor:
    """Return the value, of shape (), that training minimises for a batch: the loss's own, or the mean over the samples."""
    if isinstance(loss, WholeBatchLoss):
        return loss.batch_loss(out, y)
    return batch_mean(loss, loss.each(out, y), y)


def is_separable(loss: Loss, out: TensorSpec) -> bool:
    """Return True if the training value is a mean of independent values per sample, so that single rows can be masked.

    Args:
        loss: Loss.
        out: Spec of one output sample.
    """
    return not isinstance(loss, WholeBatchLoss) or loss.is_separable(out)


def check_separable(loss: Loss, out: TensorSpec, what: str) -> None:
    """Check that a loss has a value per sample (:func:`is_separable`).

    Args:
        loss: Loss.
        out: Spec of one output sample.
        what: Feature that needs it, for the error text.

    Raises:
        ModelError: The loss reduces a batch itself.
    """
    if not is_separable(loss, out):
        name = getattr(loss, "name", type(loss).__name__)
        raise ModelError(
            f"{what} needs the loss of each sample, and the loss {name!r} reduces a batch itself: expected one value per "
            'sample, (B,), that no other sample changes; return it (reduction="none" in torch), take a loss of edgefl '
            "(`edgefl ls losses`), or another algorithm, such as sgd",
            loss=name,
        )


def among(loss: Loss, mask: Tensor) -> Loss:
    """Return a loss that compares only samples whose ``mask`` (B,) is 1, such as those that do not pad a batch.

    If ``loss`` compares no samples with each other, it is returned itself.
    """
    return loss.among(mask) if isinstance(loss, CrossSampleLoss) else loss


def metrics_of(loss: Loss, out: TensorSpec) -> tuple[str, ...]:
    """Return the names of a loss's metrics besides the loss, the main one first.

    A loss that defines none itself has ``accuracy``. ``out`` is the spec of one output sample.
    """
    return loss.metrics(out) if isinstance(loss, LossWithMetrics) else ("accuracy",)


def sums_of(loss: Loss, out: Tensor, y: Tensor, mask: Tensor) -> Tensors:
    """Return the sums of a batch's metrics over the samples whose mask is 1.

    Args:
        loss: Loss.
        out: Outputs of the batch.
        y: Labels of the batch.
        mask: 1 for the samples that count, (B,).

    Returns:
        Sums by name: ``loss_sum``, ``correct`` and ``count``, the number of samples, each (). If the loss weights
        samples, also ``weight``, ``weighted_loss`` and ``weighted_correct``. Then the loss's own sums
        (:meth:`LossWithMetrics.sums`), () or (n,).
    """
    present = among(loss, mask)
    losses, correct = present.each(out, y), present.correct(out, y)
    rows = {"loss_sum": losses, "correct": correct}
    weight = sample_weights(loss, y)
    own = present.sums(out, y) if isinstance(present, LossWithMetrics) else {}
    if weight is not None:
        own = own | {"weight": weight, "weighted_loss": losses * weight, "weighted_correct": correct * weight}
    return {
        **{name: (each * mask).sum() for name, each in rows.items()},
        "count": mask.sum(),
        **{name: _masked_sum(each, mask) for name, each in own.items()},
    }


def _masked_sum(each: Tensor, mask: Tensor) -> Tensor:
    """Return the sum of values (B,) or (B, n) over the samples whose mask is 1, () or (n,)."""
    return (each * mask).sum() if each.dim() == 1 else (each * mask.unsqueeze(1)).sum(dim=0)


def without_absent(loss: ClassificationLoss, out: Tensor, counts: Tensor) -> Tensor:
    """Return outputs whose logits of classes without local samples are 0, so that they get no gradient (HeteroFL).

    Args:
        loss: Loss that reads the output.
        out: Outputs of a batch. They are not changed.
        counts: Number of local samples of each class, (classes,).
    """
    logits = loss.logits(out)
    return loss.output(torch.where(counts > 0, logits, torch.zeros_like(logits)))


def negative_log_likelihood(logits: Tensor, y: Tensor, smoothing: float, dim: int = -1) -> Tensor:
    """Return the cross-entropy of each label, of the shape of ``y``.

    The label's log-probability is gathered. In ONNX Runtime this takes at most two thirds of the time of a comparison
    with all classes, for 10 to 33,278 classes.

    Args:
        logits: Logits (..., C, ...).
        y: Class numbers 0..C-1, of the shape of ``logits`` without ``dim``.
        smoothing: Label smoothing, from 0 to 1.
        dim: Dimension of the classes.
    """
    logp = torch.log_softmax(logits, dim=dim)
    chosen = -logp.gather(dim, y.unsqueeze(dim)).squeeze(dim)
    return chosen if smoothing == 0.0 else (1 - smoothing) * chosen - smoothing * logp.mean(dim=dim)


def class_labels(y: Tensor, ignored: int | None) -> Tensor:
    """Return ``y`` with each label ``ignored`` replaced by class 0; ``y`` itself if ``ignored`` is None.

    A gather by labels needs this, because an ignored label need not be a class.
    """
    return y if ignored is None else torch.where(y != ignored, y, torch.zeros_like(y))


def counted_labels(y: Tensor, ignored: int | None) -> Tensor | None:
    """Return 1.0 where a label counts and 0.0 where it equals ``ignored``, float32 of the shape of ``y``.

    Return None if ``ignored`` is None, because all labels count.
    """
    return None if ignored is None else (y != ignored).to(torch.float32)


def per_sample(values: Tensor, counted: Tensor | None = None) -> Tensor:
    """Return the mean over each sample's entries, (B,).

    Args:
        values: Value of each entry, (B, ...).
        counted: 1 at the entries that count, else 0. None: all count.

    Returns:
        The means; 0 for a sample without an entry that counts.
    """
    if values.dim() == 1 and counted is None:
        return values
    flat = values.reshape(len(values), -1)
    if counted is None:
        return flat.mean(dim=1)
    mask = counted.reshape(flat.shape).to(flat.dtype)
    return (flat * mask).sum(dim=1) / mask.sum(dim=1).clamp_min(1.0)


def check_smoothing(smoothing: float) -> None:
    """Raise ModelError unless a label smoothing is in [0, 1]."""
    if not 0.0 <= smoothing <= 1.0:
        raise ModelError(f"label_smoothing lies in [0, 1], found {smoothing}", label_smoothing=smoothing)


def output_error(loss: Loss, out: TensorSpec, expected: str) -> ModelError:
    """Return the ModelError for an output that a loss cannot read.

    Args:
        loss: Loss.
        out: Spec of one output sample.
        expected: Description of the outputs that the loss reads.
    """
    return ModelError(
        f"{type(loss).__name__} reads {expected} per sample, the model gives {out.shape}: give the model the loss that fits "
        "its output (`edgefl ls losses`)",
        found=out.shape,
    )
