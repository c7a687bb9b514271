"""A loss that is a function of the user's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from edgefl.contract.tensors import Tensors, TensorSpec
from edgefl.models.losses.loss import Loss
from edgefl.models.user_code import blamed, defined_at
from edgefl.wire.errors import ModelError

Function = Callable[[Tensor, Tensor], Tensor]
_ROWS = 3
_CLOSE = 1e-4


@dataclass(frozen=True)
class OwnLoss:
    """``function(out, y)`` of outputs (B, ...) and labels (B, ...): one loss per sample, (B,), or their mean, ().

    A mean is taken apart: the function sees one sample at a time (``torch.vmap``). ``labels`` says what one sample's label
    is; None: as the data have it. Samples must not see each other, which is tried on random ones: ModelError, with what
    to do, for a function that lets them, that fails, or that returns something else.
    """

    function: Function
    labels: TensorSpec | None = None

    @property
    def name(self) -> str:
        """What the function is called."""
        bare = self.function.func if isinstance(self.function, partial) else self.function
        return getattr(bare, "__name__", type(bare).__name__)

    def reading(self, labels: TensorSpec) -> OwnLoss:
        """The same for these labels, unless it says itself what it reads."""
        return self if self.labels is not None else replace(self, labels=labels)

    def each(self, out: Tensor, y: Tensor) -> Tensor:
        values = self.function(out, y)
        return _one_by_one(self.function, out, y) if values.dim() == 0 else values

    def correct(self, out: Tensor, y: Tensor) -> Tensor:
        """0: the function says nothing of right and wrong."""
        return torch.zeros(len(out), dtype=torch.float32, device=out.device)

    def label(self, out: TensorSpec) -> TensorSpec:
        if self.labels is None:
            raise ModelError(
                f"the loss {self.name!r} does not say what labels it reads: give `data`, or "
                f"edgefl.own_loss({self.name}, labels=...) with the TensorSpec of one sample's label",
                loss=self.name,
            )
        _check(self.function, self.name, out, self.labels)
        return self.labels

    def metrics(self, out: TensorSpec) -> tuple[str, ...]:
        return ()

    def sums(self, out: Tensor, y: Tensor) -> Tensors:
        return {}


def own_loss(function: Function | Loss, labels: TensorSpec | None = None) -> Loss:
    """A ``function`` of your own as a loss: outputs (B, ...) and labels (B, ...), int64 or float32, to one loss per sample,
    (B,) float32, or their mean, ().

    ``labels``: shape and dtype of one sample's label; by default as the data have it. What is a
    :class:`~edgefl.models.losses.loss.Loss` already stays as it is. More in :class:`OwnLoss`.
    """
    return function if isinstance(function, Loss) else OwnLoss(function, labels)


def _one_by_one(function: Function, out: Tensor, y: Tensor) -> Tensor:
    def one(each: Tensor, label: Tensor) -> Tensor:
        return function(each.unsqueeze(0), label.unsqueeze(0))

    values: Tensor = torch.vmap(one)(out, y)
    return values


class _InTensors(TorchFunctionMode):
    """Refuses to hand values to Python in ways that a trace does not see: a graph would hold those of the first batch."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("tolist", "numpy", "__array__"):
            raise ModelError(
                f"{name} takes values out of a tensor, and a graph would have those of the first batch in every step: "
                "compute with tensors alone"
            )
        return func(*args, **(kwargs or {}))


@cache
def _check(function: Function, name: str, out: TensorSpec, labels: TensorSpec) -> None:
    """ModelError unless ``function`` gives a loss per sample, or their mean, that no other sample changes."""
    generator = torch.Generator().manual_seed(0)
    outputs = torch.randn((_ROWS, *out.shape), generator=generator)
    y = _labels(labels, generator)
    with (
        blamed(
            f"the loss {name!r} failed on outputs {out.shape} and labels {labels.shape}", defined_at(function)
        ),
        _InTensors(),
    ):
        values = function(outputs, y)
        if not isinstance(values, Tensor) or values.shape not in ((), (_ROWS,)):
            found = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
            raise ModelError(
                f"the loss {name!r} gives {found} for {_ROWS} samples: return one number for each, ({_ROWS},), or their "
                "mean, ()",
                loss=name,
            )
        if values.shape == ():
            alone, together = _one_by_one(function, outputs, y).mean(), values
        else:
            alone = torch.cat([function(outputs[row : row + 1], y[row : row + 1]) for row in range(_ROWS)])
            together = values
    # Random outputs may lie outside of what the function is defined on.
    if not torch.allclose(alone, together, rtol=_CLOSE, atol=_CLOSE, equal_nan=True):
        raise ModelError(
            f"the loss {name!r} of a sample depends on the others of its batch, or its mean does not weigh samples alike: "
            "return one loss per sample, (B,), that the others have no part in; for contrast within a batch take "
            "edgefl.InfoNCE or edgefl.NTXent, for tokens to be ignored SequenceCrossEntropy or CausalLM",
            loss=name,
        )


def _labels(spec: TensorSpec, generator: torch.Generator) -> Tensor:
    shape = (_ROWS, *spec.shape)
    if spec.dtype.is_floating_point:
        return torch.rand(shape, generator=generator, dtype=spec.dtype)
    return torch.randint(0, spec.below or 2, shape, generator=generator, dtype=spec.dtype)
