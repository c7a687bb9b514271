"""The trained suffix of a model as pure functions of its named tensors."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from edgefl.contract.tensors import Tensors, TensorSpec
from edgefl.errors import ModelError
from edgefl.models.caches import forgotten
from edgefl.models.counters import as_integers, counters
from edgefl.models.draws.reading import Reading, drawn
from edgefl.models.draws.steering import Steered
from edgefl.models.exit_loss import divergence
from edgefl.models.hooks import GradientHook, apply_gradient_hooks, gradient_hooks
from edgefl.models.layers.given import given, placed
from edgefl.models.losses.classes import CROSS_ENTROPY
from edgefl.models.losses.loss import (
    Loss,
    OfClasses,
    OfRounds,
    batch_mean,
    check_separable,
    metrics_of,
    sums_of,
    training_loss,
    without_absent,
)
from edgefl.models.spec import ModelSpec, output_spec, skeleton
from edgefl.objective.carrier import Carrier, Whole


class TrainedPart(Protocol):
    """What an objective needs of a submodel: its trained units, what they read, and the model they come from."""

    @property
    def spec(self) -> ModelSpec: ...
    @property
    def suffix(self) -> nn.Sequential: ...
    @property
    def boundary(self) -> TensorSpec: ...
    @property
    def carrier(self) -> Carrier | None: ...


@dataclass(frozen=True)
class SelfDistillation:
    """FjORD's self-distillation: what a step leaves out of the submodel learns from what the submodel says as a whole.

    With z the step's output and Z that of the tensors which inference reads (the device's largest width), the loss is
    ``l(Z, y) + (1 - weight) l(z, y) + weight T^2 KL(softmax(Z / T) || softmax(z / T))``, Z a constant in the last term.
    ``weight`` 1 is the FjORD paper's choice. ModelError for a weight outside [0, 1] or T <= 0.
    """

    weight: float = 1.0
    temperature: float = 1.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.weight <= 1.0:
            raise ModelError(
                f"the weight of distillation lies in [0, 1], found {self.weight}", weight=self.weight
            )
        if self.temperature <= 0.0:
            raise ModelError(
                f"the temperature of distillation is above 0, found {self.temperature}",
                temperature=self.temperature,
            )


@dataclass(frozen=True, eq=False)
class Objective:
    """Mean ``loss`` of ``suffix`` on a batch, its gradient's ingredients and its inference.

    ``boundary``: one sample of the suffix's input, without batch dimension. ``carried``: how its tensors travel and act;
    None: as they are. ``masked``: logits of classes that no local sample has are 0 (HeteroFL). ``distilled``:
    self-distillation.

    ``suffix`` maps the boundary tensor (B, *boundary.shape) to what the loss reads: for the default, logits
    (B, classes), or one logit (B, 1) for two classes. Only its structure and shapes are used; values always come
    from the arguments. Raises ModelError for a suffix without a parameter that gradients move, and for ``masked`` or
    ``distilled`` with a loss that is not one over classes.
    """

    suffix: nn.Sequential
    boundary: TensorSpec
    loss: Loss = CROSS_ENTROPY
    carried: Carrier | None = None
    masked: bool = False
    distilled: SelfDistillation | None = None
    _modes: dict[bool, nn.Sequential] = field(init=False, repr=False, default_factory=dict)
    _hooks: dict[str, Sequence[GradientHook]] = field(init=False, repr=False, default_factory=dict)
    _draws: dict[int, Mapping[str, TensorSpec]] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        if not self.trainable:
            raise ModelError(
                f"nothing to train: of the suffix's {len(self.weights)} state tensors ({len(self.suffix)} units) none is a "
                "parameter that requires a gradient; give the model a layer with weights, cut it earlier, or set "
                "requires_grad",
                units=len(self.suffix),
            )
        if (self.masked or self.distilled) and not isinstance(self.loss, OfClasses):
            raise ModelError(
                f"masked_loss and self_distillation need logits of classes, and {type(self.loss).__name__} reads none; "
                "leave them off",
                loss=type(self.loss).__name__,
            )
        if self.distilled is not None:
            check_separable(self.loss, self._out, "self_distillation")
        for training in (True, False):
            self._modes[training] = skeleton(self.suffix, training=training)
        self._hooks.update(gradient_hooks(self.suffix))

    @classmethod
    def of(cls, part: TrainedPart) -> Objective:
        """The objective of a submodel, of whichever kind."""
        return cls(part.suffix, part.boundary, part.spec.loss, part.carrier)

    @cached_property
    def carrier(self) -> Carrier:
        """What lies between the payload and :attr:`weights`."""
        return self.carried or Whole(self.weights)

    @property
    def training_module(self) -> nn.Sequential:
        """The suffix without values, in the modes in which it trains."""
        return self._modes[True]

    @cached_property
    def weights(self) -> Mapping[str, TensorSpec]:
        """Every state tensor of the suffix, moving statistics included, in state order."""
        state = self.suffix.state_dict(keep_vars=True)
        return {name: TensorSpec.holding(tensor) for name, tensor in state.items()}

    @cached_property
    def trainable(self) -> tuple[str, ...]:
        """Names of the tensors that gradients move."""
        return tuple(name for name, parameter in self.suffix.named_parameters() if parameter.requires_grad)

    @cached_property
    def fixed(self) -> tuple[str, ...]:
        """Names of the other state tensors: moving statistics, and parameters that require no gradient."""
        return tuple(name for name in self.weights if name not in self.trainable)

    @cached_property
    def buffers(self) -> tuple[str, ...]:
        """Names of the moving statistics: what training moves without a gradient."""
        own = dict(self.suffix.named_buffers(remove_duplicate=False))
        return tuple(name for name in self.fixed if name in own)

    @cached_property
    def kernels(self) -> frozenset[str]:
        """Trainable kernels of conv, dense and recurrent layers: what weight decay acts on (embracingfl.md 8, row 12)."""
        embeddings = {
            f"{path}.weight" if path else "weight"
            for path, module in self.suffix.named_modules()
            if isinstance(module, nn.Embedding | nn.EmbeddingBag)
        }
        return frozenset(
            name for name in self.trainable if len(self.weights[name].shape) >= 2 and name not in embeddings
        )

    def batch(self, size: int) -> TensorSpec:
        """The port of ``size`` boundary samples."""
        return self.boundary.rows(size)

    def others(self, size: int) -> Mapping[str, TensorSpec]:
        """The ports of ``size`` samples of what the suffix reads beside the boundary, by the inputs' names."""
        return {name: sample.rows(size) for name, sample in given(self.suffix).items()}

    def labels(self, size: int) -> TensorSpec:
        """The port of ``size`` labels, as the loss reads them. ModelError if it cannot read the suffix's output."""
        return self._label.rows(size)

    @cached_property
    def facts(self) -> Mapping[str, TensorSpec]:
        """What training asks about the local data as a whole (``data.*``)."""
        classes = self._label.below
        return {"class_counts": TensorSpec((classes,), torch.int64)} if self.masked and classes else {}

    @property
    def scalars(self) -> tuple[str, ...]:
        """What training reads of the round beside the algorithm's own scalars (``hyper.*``)."""
        return self.loss.scalars if isinstance(self.loss, OfRounds) else ()

    def with_loss(self, loss: Loss) -> Objective:
        """The same on another loss of the same labels; both share the suffix's modules."""
        other = copy.copy(self)
        object.__setattr__(other, "loss", loss)
        return other

    @cached_property
    def _label(self) -> TensorSpec:
        return self.loss.label(self._out)

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the metrics of the task, the one that people are shown first; () where there is but the loss."""
        return metrics_of(self.loss, self._out)

    @cached_property
    def _out(self) -> TensorSpec:
        return output_spec(self.suffix, self.boundary)

    def noise(self, size: int) -> Mapping[str, TensorSpec]:
        """The uniform tensors that the carrier and the suffix read in training, by name."""
        return {**self.carrier.noise, **self._drawn(size)}

    def _drawn(self, size: int) -> Mapping[str, TensorSpec]:
        """What the suffix draws for ``size`` samples, in order. The names are the same for all sizes."""
        if size not in self._draws:
            self._draws[size] = drawn(self._modes[True], self.weights, self.batch(size))
        return self._draws[size]

    def __call__(
        self,
        params: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        x: Tensor,
        y: Tensor,
        noise: Mapping[str, Tensor] | None = None,
        gates: Mapping[str, Tensor] | None = None,
        facts: Mapping[str, Tensor] | None = None,
        hyper: Mapping[str, Tensor] | None = None,
        others: Mapping[str, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor, Tensors]:
        """Training mode: (mean loss () over the samples as they weigh, number correct () float32, buffers after the pass).

        ``params`` holds :attr:`trainable`, ``buffers`` holds :attr:`fixed`, ``x`` is (B, *boundary), ``y`` as
        :meth:`labels` says, ``facts`` those of :attr:`facts`, ``hyper`` the scalars of :attr:`scalars`, ``others`` the
        rows of :meth:`others`. The arguments are never changed: batch norm's moving statistics come back as new tensors.
        """
        loss = self.loss.at(hyper or {}) if isinstance(self.loss, OfRounds) and self.scalars else self.loss
        uniform = dict(noise or {})

        def run(training: bool) -> tuple[Tensor, Tensors]:
            """The output, and the buffers after it, at the tensors that training or inference reads."""
            read = self.carrier.effective(dict(params), dict(gates or {}), uniform, training=training)
            tensors = {**read, **{name: buffers[name].clone() for name in self.fixed}}
            with self._reading(uniform):
                out = self._output(tensors, x, others, training=True)
            if self.masked:
                out = without_absent(cast(OfClasses, self.loss), out, (facts or {})["class_counts"])
            return out, {name: tensors[name].detach() for name in self.fixed}

        out, moved = run(training=True)
        if self.distilled is not None:
            losses = loss.each(out, y)
            part, (out, moved) = out, run(training=False)
            value = batch_mean(
                loss, loss.each(out, y) + self._distilled(self.distilled, part, out, losses), y
            )
        else:
            value = training_loss(loss, out, y)
            moved = self.carrier.rested(moved, {name: buffers[name] for name in self.fixed}, uniform)
        return value, loss.correct(out.detach(), y).sum(), moved

    def _distilled(self, how: SelfDistillation, part: Tensor, whole: Tensor, losses: Tensor) -> Tensor:
        """What distillation adds to the loss at ``whole``; ``losses`` are those at ``part``. All of them (B,)."""
        logits = cast(OfClasses, self.loss).logits
        apart = divergence(logits(whole).detach(), logits(part), how.temperature)
        return (1 - how.weight) * losses + how.weight * how.temperature**2 * apart

    def evaluate(
        self,
        weights: Mapping[str, Tensor],
        x: Tensor,
        y: Tensor,
        mask: Tensor,
        gates: Mapping[str, Tensor] | None = None,
        others: Mapping[str, Tensor] | None = None,
    ) -> Tensors:
        """Inference mode: what loss and metrics are made of, over the rows whose ``mask`` (B,) is 1 (:func:`sums_of`)."""
        return sums_of(self.loss, self.predict(weights, x, gates, others), y, mask)

    def predict(
        self,
        weights: Mapping[str, Tensor],
        x: Tensor,
        gates: Mapping[str, Tensor] | None = None,
        others: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """Inference mode: the output. ``weights`` may hold more than the suffix, such as the whole model."""
        tensors = {name: tensor for name, tensor in weights.items() if name in self.weights}
        read = self.carrier.effective(tensors, dict(gates or {}), {}, training=False)
        with Steered():
            return self._output(read, x, others, training=False)

    def _reading(self, uniform: Mapping[str, Tensor]) -> AbstractContextManager[object]:
        """What the suffix draws comes from ``uniform``; from torch's generator where there is nothing in it for that."""
        numbers = {name: tensor for name, tensor in uniform.items() if name not in self.carrier.noise}
        if not numbers:
            return Steered()
        # Whoever has numbers has asked for the ports before, and this may run inside a trace, where no other run can.
        names = next(iter(self._draws.values()), None) or self._drawn(2)
        return Reading.of(tuple(names), numbers)

    def _output(
        self, tensors: Tensors, x: Tensor, others: Mapping[str, Tensor] | None, *, training: bool
    ) -> Tensor:
        missing = [name for name in self.weights if name not in tensors]
        if missing:
            raise ModelError(f"the suffix needs {missing[0]!r}, which was not given", missing=missing)
        mode = self._modes[training]
        tensors |= placed(mode, others or {})
        if training:
            hooked = {name: hooks for name, hooks in self._hooks.items() if name in self.trainable}
            tensors |= {name: apply_gradient_hooks(tensors[name], hooks) for name, hooks in hooked.items()}
        # Counters that forward moves in place, such as batch norm's: under torch.func only copies may be written to.
        # One name of a shared buffer is enough: functional_call sets the others, and refuses two values.
        buffers = mode.named_buffers(remove_duplicate=False)
        placed_ids = {id(buffer) for name, buffer in buffers if name in tensors}
        tensors |= {
            name: buffer.clone()
            for name, buffer in mode.named_buffers()
            if id(buffer) not in placed_ids and not buffer.is_floating_point()
        }
        whole = counters(mode)
        tensors |= as_integers(tensors, whole)
        # Rebound buffers are written back into `tensors`, which is how the new moving statistics get out.
        with forgotten(mode):
            out = cast(Tensor, torch.func.functional_call(mode, tensors, (x,)))
        for name in whole:
            tensors[name] = tensors[name].to(torch.float32)
        return out
