"""A loss that is a function of the user's own."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from edgefl.contract.tensors import Tensors, TensorSpec
from edgefl.errors import ModelError
from edgefl.models.losses.loss import Loss
from edgefl.models.losses.trial import Trial, try_loss
from edgefl.models.rewritten import Rewriting

Function = Callable[[Tensor, Tensor], Tensor]
_OF_CLASSES = (nn.CrossEntropyLoss, nn.NLLLoss, nn.MultiMarginLoss)
_OF_NUMBERS = (
    nn.MSELoss,
    nn.L1Loss,
    nn.SmoothL1Loss,
    nn.HuberLoss,
    nn.BCEWithLogitsLoss,
    nn.BCELoss,
    nn.PoissonNLLLoss,
)


@dataclass(frozen=True)
class OwnLoss:
    """Loss computed by ``function(out, y)`` from outputs (B, ...) and labels (B, ...).

    The function returns one value, (), as ``nn.CrossEntropyLoss(weight=...)`` does, or one value per sample, (B,).
    Training minimises the value, or the mean of the values, of the whole batch: class weights, ignored labels, sums and
    terms between samples train as in torch. Evaluation pads its last batch, so it calls the function with one sample at a
    time and averages; a sample whose label alone makes the value NaN, such as one with ignored labels only, counts as 0.

    Args:
        function: Function, ``functools.partial``, bound method, or ``nn.Module`` without trained parameters. Hidden state
            and random numbers are refused.
        labels: Shape and dtype of one sample's label; by default as the data have it.
    """

    function: Function
    labels: TensorSpec | None = None

    @property
    def name(self) -> str:
        """What the function is called."""
        bare = self.function.func if isinstance(self.function, partial) else self.function
        return getattr(bare, "__name__", type(bare).__name__)

    def reading(self, labels: TensorSpec | None, out: TensorSpec) -> OwnLoss:
        """Return the same loss for the labels of the data, unless it has labels of its own.

        Args:
            labels: One label of the data; None if unknown: a loss module of torch decides by the output.
            out: Output of one sample.
        """
        if self.labels is not None:
            return self
        return replace(self, labels=labels or _labels_of(self.function, out))

    def batch_loss(self, out: Tensor, y: Tensor) -> Tensor:
        """Return the training loss of a whole batch, ()."""
        with Rewriting():
            values = self.function(out, y)
        return values if values.dim() == 0 else values.mean()

    def is_separable(self, out: TensorSpec) -> bool:
        """Return True if the function returns one loss per sample and no other sample changes it."""
        return self._tried(out).separable

    def each(self, out: Tensor, y: Tensor) -> Tensor:
        """Return the loss of each sample alone, (B,), for evaluation."""
        with Rewriting():
            values, reduced = _one_by_one(self.function, out, y)
            if not reduced:
                return values
            # 0 / 0 of a mean over no label. NaN of a diverged model must stay, so constant outputs decide.
            blank, _ = _one_by_one(self.function, torch.ones_like(out), y)
        empty = torch.logical_and(blank.isnan(), values.isnan())
        return torch.where(empty, torch.zeros_like(values), values)

    def correct(self, out: Tensor, y: Tensor) -> Tensor:
        """0: the function says nothing of right and wrong."""
        return torch.zeros(len(out), dtype=torch.float32, device=out.device)

    def label(self, out: TensorSpec) -> TensorSpec:
        return self._tried(out).labels

    def metrics(self, out: TensorSpec) -> tuple[str, ...]:
        return ()

    def sums(self, out: Tensor, y: Tensor) -> Tensors:
        return {}

    def _tried(self, out: TensorSpec) -> Trial:
        if self.labels is None:
            raise ModelError(
                f"the loss {self.name!r} does not say what labels it reads: give `data`, or "
                f"edgefl.losses.own_loss({self.name}, labels=...) with the TensorSpec of one sample's label",
                loss=self.name,
            )
        return try_loss(self.function, self.name, out, self.labels, self.each)


def own_loss(function: Function | Loss, labels: TensorSpec | None = None) -> Loss:
    """Make a loss of a ``function`` of your own, or of a loss module of torch.

    Example::

        edgefl.losses.own_loss(nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0, 0.2])))

    Args:
        function: Maps outputs (B, ...) and labels (B, ...), int64 or float32, to one loss, (), or one per sample, (B,).
            A :class:`~edgefl.models.losses.loss.Loss` is returned as it is.
        labels: Shape and dtype of one sample's label; by default as the data have it.

    Returns:
        The loss; see :class:`OwnLoss` for what training and evaluation do with it.
    """
    return function if isinstance(function, Loss) else OwnLoss(function, labels)


def _labels_of(function: Function, out: TensorSpec) -> TensorSpec | None:
    """Return the label that a loss module of torch reads beside an output ``out``; None if unknown."""
    if isinstance(function, _OF_CLASSES) and out.shape:
        places = out.shape[1:]
        ignored: int | None = getattr(function, "ignore_index", None)
        # -100 is the default also where each sample has a class.
        return TensorSpec(
            places, torch.int64, out.shape[0], None if ignored == -100 and not places else ignored
        )
    return TensorSpec(out.shape, torch.float32) if isinstance(function, _OF_NUMBERS) else None


def _one_by_one(function: Function, out: Tensor, y: Tensor) -> tuple[Tensor, bool]:
    """Return the value of ``function`` for each sample alone, (B,), and whether it reduces a batch to one value."""
    reduced = False

    def alone(row: Tensor, label: Tensor) -> Tensor:
        nonlocal reduced
        # Some functions write into the labels, which are needed again.
        value = function(row.unsqueeze(0), label.unsqueeze(0).clone())
        reduced = value.dim() == 0
        return value.reshape(())

    try:
        with warnings.catch_warnings():
            # An op without a batching rule runs row by row, which is slow but right; a deviation of one row is NaN.
            warnings.simplefilter("ignore")
            values: Tensor = torch.vmap(alone)(out, y)
    except (RuntimeError, NotImplementedError):  # custom gradients, writes into tensors, lengths as lists
        values = torch.stack([alone(*pair) for pair in zip(out.unbind(), y.unbind(), strict=True)])
    return values, reduced
