"""Loss of a model with early exits: weighted sum of the exits' losses, deeper exits with more weight (ScaleFL, fiarse.md
3).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from torch import Tensor
from torch.nn import functional as F

from edgefl.contract.tensors import Tensors, TensorSpec
from edgefl.errors import ModelError
from edgefl.models.losses.loss import (
    ClassificationLoss,
    Loss,
    LossWithMetrics,
    WholeBatchLoss,
    among,
    batch_mean,
    is_separable,
    metrics_of,
    sample_weights,
    training_loss,
)

TEMPERATURE = 3.0
WEIGHT = "kd_weight"
"""Name of the scalar ``hyper.kd_weight`` that the server announces for each round."""


@dataclass(frozen=True)
class ExitLoss:
    """Weighted mean of the losses of m exits: ``sum_j j / (m (m + 1) / 2) * l_j`` over j = 1..m, for outputs (B, m, *out).

    l_m is the ``base`` loss of the last exit. For j < m, l_j is the base loss of exit j plus ``kd_weight`` times the
    divergence ``KL(p_m || p_j)``. There p = softmax(z / 3) for logits z, p_m is constant, and tokens are averaged. The
    usual factor 3^2 of distillation is part of ``kd_weight``. An output (B, *out) of the last exit alone has the base
    loss. Metrics are computed for the last exit.

    Attributes:
        base: Loss of one exit.
        rank: Number of dimensions of an output (B, *out). An output of all exits has one more.
        kd_weight: Weight of the divergence. A scalar tensor if the round announces it.
        announced: True if training reads the weight from the round, ``hyper.kd_weight``.
    """

    base: Loss
    rank: int
    kd_weight: float | Tensor = 0.0
    announced: bool = False

    def __post_init__(self) -> None:
        weight = self.kd_weight
        if isinstance(weight, Tensor):  # the server checked it
            return
        if weight < 0.0:
            raise ModelError(f"kd_weight is 0 or more, found {weight}", kd_weight=weight)
        if weight and not isinstance(self.base, ClassificationLoss):
            raise ModelError(
                f"distillation between exits compares probabilities of classes, and {type(self.base).__name__} has "
                "none; leave kd_weight at 0",
                loss=type(self.base).__name__,
            )

    @property
    def scalars(self) -> tuple[str, ...]:
        """Names of the scalars that the server announces for each round: ``kd_weight`` if :attr:`announced`, else none."""
        return (WEIGHT,) if self.announced else ()

    def at(self, scalars: Mapping[str, Tensor]) -> ExitLoss:
        """Return a copy with the weight that a round announces.

        ``scalars`` has the scalars of the round by name, among them ``kd_weight``, of shape ().
        """
        return replace(self, kd_weight=scalars[WEIGHT])

    def each(self, out: Tensor, y: Tensor) -> Tensor:
        if out.dim() == self.rank:
            return self.base.each(out, y)
        return self._over_exits(out, lambda logits: self.base.each(logits, y), self._distillation)

    def batch_loss(self, out: Tensor, y: Tensor) -> Tensor:
        """Return the value that training minimises for a batch, of shape ().

        Args:
            out: Outputs of all m exits (B, m, *out), or of the last exit alone (B, *out).
            y: Labels of the batch.
        """
        if not isinstance(self.base, WholeBatchLoss):
            return batch_mean(self, self.each(out, y), y)
        if out.dim() == self.rank:
            return training_loss(self.base, out, y)

        def distilled(last: Tensor, early: Tensor) -> Tensor | float:
            values = self._distillation(last, early)
            return batch_mean(self, values, y) if isinstance(values, Tensor) else values

        return self._over_exits(out, lambda logits: training_loss(self.base, logits, y), distilled)

    def is_separable(self, out: TensorSpec) -> bool:
        """Return True if the loss of one exit is a mean of independent values per sample.

        See :func:`edgefl.models.losses.loss.is_separable`.
        """
        return is_separable(self.base, out)

    def _over_exits(
        self,
        out: Tensor,
        loss_of: Callable[[Tensor], Tensor],
        distilled: Callable[[Tensor, Tensor], Tensor | float],
    ) -> Tensor:
        """Return the weighted mean of the exits' losses, of the shape that ``loss_of`` returns.

        Args:
            out: Outputs of all m exits, (B, m, *out).
            loss_of: Function that returns the base loss of one exit's output.
            distilled: Function (last output, early output) that returns the weighted divergence.
        """
        *early, last = out.unbind(dim=1)
        count = len(early) + 1
        total = count * loss_of(last)
        for position, logits in enumerate(early, start=1):
            total = total + position * (loss_of(logits) + distilled(last, logits))
        return total / (count * (count + 1) / 2)

    def _distillation(self, last: Tensor, early: Tensor) -> Tensor | float:
        """Return ``kd_weight`` times the divergence of an early exit from the last one, (B,); 0.0 without distillation.

        ``last`` and ``early`` are outputs (B, *out) of one exit. ``last`` gets no gradient.
        """
        off = not isinstance(self.kd_weight, Tensor) and not self.kd_weight
        if off or not isinstance(self.base, ClassificationLoss):
            return 0.0
        return self.kd_weight * divergence(self.base.logits(last).detach(), self.base.logits(early))

    def correct(self, out: Tensor, y: Tensor) -> Tensor:
        return self.base.correct(self._last(out), y)

    def label(self, out: TensorSpec) -> TensorSpec:
        return self.base.label(out)

    def weight(self, y: Tensor) -> Tensor | None:
        return sample_weights(self.base, y)

    def among(self, mask: Tensor) -> ExitLoss:
        return replace(self, base=among(self.base, mask))

    def metrics(self, out: TensorSpec) -> tuple[str, ...]:
        return metrics_of(self.base, out)

    def sums(self, out: Tensor, y: Tensor) -> Tensors:
        return self.base.sums(self._last(out), y) if isinstance(self.base, LossWithMetrics) else {}

    def _last(self, out: Tensor) -> Tensor:
        """Return the output of the last exit, (B, *out).

        ``out`` may be this output alone, or that of all exits (B, m, *out).
        """
        return out if out.dim() == self.rank else out[:, -1]


def divergence(teacher: Tensor, student: Tensor, temperature: float = TEMPERATURE) -> Tensor:
    """Return KL(softmax(teacher / T) || softmax(student / T)) per sample, (B,), for logits (B, ..., C).

    Dimensions between batch and classes are averaged.

    Args:
        teacher: Logits of the target distribution.
        student: Logits of the estimate.
        temperature: The divisor T of the logits.
    """
    target, estimate = (F.log_softmax(logits / temperature, dim=-1) for logits in (teacher, student))
    each = (target.exp() * (target - estimate)).sum(dim=-1)
    return each.flatten(1).mean(dim=1) if each.dim() > 1 else each
