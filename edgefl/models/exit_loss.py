"""What a model with early exits is trained on: the losses of its exits, the deeper the heavier (ScaleFL, fiarse.md 3)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from torch import Tensor
from torch.nn import functional as F

from edgefl.contract.tensors import Tensors, TensorSpec
from edgefl.errors import ModelError
from edgefl.models.losses.loss import (
    Loss,
    Measured,
    OfClasses,
    WholeBatch,
    among,
    batch_mean,
    is_separable,
    metrics_of,
    sample_weights,
    training_loss,
)

TEMPERATURE = 3.0
WEIGHT = "kd_weight"
"""Name of the scalar that a server announces, ``hyper.kd_weight``."""


@dataclass(frozen=True)
class ExitLoss:
    """``sum_j j / (m (m + 1) / 2) * l_j`` over the exits j = 1..m of an output (B, m, *out), the last one last.

    l_m is the ``base`` loss of exit m; for j < m it is that of exit j plus ``kd_weight`` times the divergence
    ``KL(p_m || p_j)``, p = softmax(z / 3), z the logits, p_m a constant; mean over tokens where there are some. There is
    no factor 3^2 as in other people's distillation: it is part of ``kd_weight``.
    An output (B, *out), of the last exit alone, has the base loss. What is right or wrong, the last exit says.
    """

    base: Loss
    # Dimensions of an output (B, *out); one with exits has one more.
    rank: int
    # A scalar tensor where it comes from the round.
    kd_weight: float | Tensor = 0.0
    # In training the weight is that of the round, ``hyper.kd_weight``.
    announced: bool = False

    def __post_init__(self) -> None:
        weight = self.kd_weight
        if isinstance(weight, Tensor):  # checked where it came from
            return
        if weight < 0.0:
            raise ModelError(f"kd_weight is 0 or more, found {weight}", kd_weight=weight)
        if weight and not isinstance(self.base, OfClasses):
            raise ModelError(
                f"distillation between exits compares probabilities of classes, and {type(self.base).__name__} has "
                "none; leave kd_weight at 0",
                loss=type(self.base).__name__,
            )

    @property
    def scalars(self) -> tuple[str, ...]:
        return (WEIGHT,) if self.announced else ()

    def at(self, scalars: Mapping[str, Tensor]) -> ExitLoss:
        """The same loss with the round's weight of the divergence."""
        return replace(self, kd_weight=scalars[WEIGHT])

    def each(self, out: Tensor, y: Tensor) -> Tensor:
        if out.dim() == self.rank:
            return self.base.each(out, y)
        return self._over_exits(out, lambda logits: self.base.each(logits, y), self._distilled)

    def batch_loss(self, out: Tensor, y: Tensor) -> Tensor:
        """Return the training value of a batch, (): with a base that reduces a batch itself, the sum of its values."""
        if not isinstance(self.base, WholeBatch):
            return batch_mean(self, self.each(out, y), y)
        if out.dim() == self.rank:
            return training_loss(self.base, out, y)

        def apart(last: Tensor, said: Tensor) -> Tensor | float:
            found = self._distilled(last, said)
            return batch_mean(self, found, y) if isinstance(found, Tensor) else found

        return self._over_exits(out, lambda logits: training_loss(self.base, logits, y), apart)

    def is_separable(self, out: TensorSpec) -> bool:
        return is_separable(self.base, out)

    def _over_exits(
        self,
        out: Tensor,
        loss_of: Callable[[Tensor], Tensor],
        distilled: Callable[[Tensor, Tensor], Tensor | float],
    ) -> Tensor:
        """Return the weighted mean of what the exits cost, of the shape that ``loss_of`` gives."""
        *early, last = out.unbind(dim=1)
        count = len(early) + 1
        total = count * loss_of(last)
        for position, logits in enumerate(early, start=1):
            total = total + position * (loss_of(logits) + distilled(last, logits))
        return total / (count * (count + 1) / 2)

    def _distilled(self, last: Tensor, said: Tensor) -> Tensor | float:
        """What an early exit is to pay for being unlike the last one, (B,)."""
        off = not isinstance(self.kd_weight, Tensor) and not self.kd_weight
        if off or not isinstance(self.base, OfClasses):
            return 0.0
        return self.kd_weight * divergence(self.base.logits(last).detach(), self.base.logits(said))

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
        return self.base.sums(self._last(out), y) if isinstance(self.base, Measured) else {}

    def _last(self, out: Tensor) -> Tensor:
        """What the last exit says."""
        return out if out.dim() == self.rank else out[:, -1]


def divergence(teacher: Tensor, student: Tensor, temperature: float = TEMPERATURE) -> Tensor:
    """KL(softmax(teacher / T) || softmax(student / T)) of logits (B, ..., C), per sample: (B,), mean over the rest."""
    wanted, estimate = (F.log_softmax(logits / temperature, dim=-1) for logits in (teacher, student))
    each = (wanted.exp() * (wanted - estimate)).sum(dim=-1)
    return each.flatten(1).mean(dim=1) if each.dim() > 1 else each
