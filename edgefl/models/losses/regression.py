"""Losses for labels that are numbers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from edgefl.contract.tensors import Tensors, TensorSpec
from edgefl.errors import ModelError
from edgefl.models.losses.loss import output_error, per_sample

TOLERANCE = 0.5
"""Largest distance from the label at which an entry counts as correct."""


class _Regression:
    """Base of regression losses.

    It defines labels, correct answers (by the attribute ``tolerance``) and the metric ``mae``.
    """

    tolerance: float

    def correct(self, out: Tensor, y: Tensor) -> Tensor:
        return per_sample(((out - y).abs() <= self.tolerance).to(torch.float32))

    def label(self, out: TensorSpec) -> TensorSpec:
        return TensorSpec(out.shape, torch.float32)

    def metrics(self, out: TensorSpec) -> tuple[str, ...]:
        return ("mae",)

    def sums(self, out: Tensor, y: Tensor) -> Tensors:
        return {"absolute": per_sample((out - y).abs())}


@dataclass(frozen=True)
class SquaredError(_Regression):
    """Squared error, for labels that are numbers.

    ``(out - y)^2`` for out and y (B, *S) float32, mean over a sample's entries.

    Args:
        tolerance: Largest distance from the label at which an entry counts as correct.
    """

    tolerance: float = TOLERANCE

    def each(self, out: Tensor, y: Tensor) -> Tensor:
        return per_sample((out - y).square())


@dataclass(frozen=True)
class AbsoluteError(_Regression):
    """Absolute error, for labels that are numbers.

    ``|out - y|`` for out and y (B, *S) float32, mean over a sample's entries.

    Args:
        tolerance: Largest distance from the label at which an entry counts as correct.
    """

    tolerance: float = TOLERANCE

    def each(self, out: Tensor, y: Tensor) -> Tensor:
        return per_sample((out - y).abs())


@dataclass(frozen=True)
class Huber(_Regression):
    """Huber loss, for labels that are numbers with outliers.

    With e = out - y, ``e^2 / 2`` where |e| <= ``delta`` and ``delta * (|e| - delta / 2)`` beyond, mean over a sample's
    entries (Huber 1964).

    Args:
        delta: Error at which the loss becomes linear; above 0.
        tolerance: Largest distance from the label at which an entry counts as correct.

    Raises:
        ModelError: ``delta`` is out of range.
    """

    delta: float = 1.0
    tolerance: float = TOLERANCE

    def __post_init__(self) -> None:
        if self.delta <= 0.0:
            raise ModelError(f"delta of the loss huber is above 0, found {self.delta}", delta=self.delta)

    def each(self, out: Tensor, y: Tensor) -> Tensor:
        return per_sample(F.huber_loss(out, y, reduction="none", delta=self.delta))


@dataclass(frozen=True)
class Quantile(_Regression):
    """Pinball loss, for quantiles of labels that are numbers.

    With e = y - out, ``max(q e, (q - 1) e)`` for each level q, mean over levels and entries (Koenker and Bassett 1978).
    out is (B, *S, levels) and y (B, *S) float32; with a single level out is (B, *S). Accuracy and absolute error are
    computed for the level nearest to the median.

    Args:
        levels: Levels q, each between 0 and 1.
        tolerance: Largest distance from the label at which an entry of that level counts as correct.

    Raises:
        ModelError: A level is out of range, or there is none.
    """

    levels: tuple[float, ...] = (0.5,)
    tolerance: float = TOLERANCE

    def __post_init__(self) -> None:
        object.__setattr__(self, "levels", tuple(self.levels))  # a file has a list
        if not self.levels or not all(0.0 < level < 1.0 for level in self.levels):
            raise ModelError(
                f"levels of the loss quantile lie between 0 and 1, such as 0.1, 0.5, 0.9; found {self.levels}",
                levels=self.levels,
            )

    def each(self, out: Tensor, y: Tensor) -> Tensor:
        if len(self.levels) == 1:
            return per_sample(_pinball(out, y, self.levels[0]))
        parts = out.unbind(dim=-1)
        values = [_pinball(part, y, level) for part, level in zip(parts, self.levels, strict=True)]
        return per_sample(torch.stack(values, dim=-1))

    def correct(self, out: Tensor, y: Tensor) -> Tensor:
        return super().correct(self._median(out), y)

    def label(self, out: TensorSpec) -> TensorSpec:
        if len(self.levels) == 1:
            return super().label(out)
        if out.shape[-1:] != (len(self.levels),):
            raise output_error(self, out, f"(..., {len(self.levels)}) numbers, one for each level,")
        return TensorSpec(out.shape[:-1], torch.float32)

    def sums(self, out: Tensor, y: Tensor) -> Tensors:
        return super().sums(self._median(out), y)

    def _median(self, out: Tensor) -> Tensor:
        """Return the output of the level nearest to 0.5, of the shape of the labels."""
        if len(self.levels) == 1:
            return out
        return out[..., min(range(len(self.levels)), key=lambda at: abs(self.levels[at] - 0.5))]


def _pinball(out: Tensor, y: Tensor, level: float) -> Tensor:
    """Return the pinball loss of each entry for the quantile ``level``, of the shape of ``out``."""
    error = y - out
    return torch.maximum(level * error, (level - 1.0) * error)
