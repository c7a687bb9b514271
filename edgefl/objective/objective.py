"""Loss and inference of the trained suffix of a model, as pure functions of its named tensors."""

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
from edgefl.models.counters import counter_dtypes, round_counters
from edgefl.models.hooks import GradientHook, apply_gradient_hooks, gradient_hooks
from edgefl.models.inputs import extra_inputs, input_tensors
from edgefl.models.losses.classification import CROSS_ENTROPY
from edgefl.models.losses.exit_loss import divergence
from edgefl.models.losses.loss import (
    ClassificationLoss,
    Loss,
    RoundScalarsLoss,
    batch_mean,
    check_separable,
    metrics_of,
    sums_of,
    training_loss,
    without_absent,
)
from edgefl.models.python_state.snapshots import restored_state
from edgefl.models.spec import ModelSpec, output_spec, skeleton
from edgefl.models.torch_functions.control_flow import TraceableMode
from edgefl.models.torch_functions.random_inputs import RandomInputMode, random_inputs
from edgefl.objective.carrier import Carrier, WholeCarrier


class TrainedPart(Protocol):
    """Interface of a submodel for an objective.

    ``suffix`` has its trained units, ``boundary`` the spec of one sample of their input, ``carrier`` converts its tensors
    (None: unchanged), and ``spec`` describes the whole model with its loss.
    """

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
    """Settings of FjORD's self-distillation: the narrower model of a step learns from the output of the whole submodel.

    z is the output of the step's model. Z is the output of the weights that inference reads, the device's largest
    width. The loss is ``l(Z, y) + (1 - weight) l(z, y) + weight T^2 KL(softmax(Z / T) || softmax(z / T))``, Z a
    constant in the last term. ``weight`` 1 is the FjORD paper's choice; ``temperature`` is T.

    Raises:
        ModelError: ``weight`` is outside [0, 1], or T <= 0.
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
    """Mean loss of the trained suffix of a model on a batch, and its inference, as pure functions of named tensors.

    The suffix is the part of the model that a tier trains, such as its last layers.

    Attributes:
        suffix: Module from the boundary tensor (B, *boundary.shape) to the input of the loss: by default logits (B,
            classes), or one logit (B, 1) for two classes. Only its structure and shapes are used; values come from the
            arguments.
        boundary: Spec of one sample of the suffix's input, without batch dimension.
        loss: Training loss.
        carried: Carrier, which converts the suffix's tensors between the network and training. None: they are sent and
            received unchanged.
        masked: True: set the logits of classes without local samples to 0 (HeteroFL).
        distilled: Settings of self-distillation. None: off.

    Raises:
        ModelError: The suffix has no parameter that requires a gradient, or ``masked`` or ``distilled`` is combined
            with a loss that does not read logits of classes.
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
        if (self.masked or self.distilled) and not isinstance(self.loss, ClassificationLoss):
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
        """Return the objective of a submodel of any kind, with the loss of its model."""
        return cls(part.suffix, part.boundary, part.spec.loss, part.carrier)

    @cached_property
    def carrier(self) -> Carrier:
        """Carrier of the suffix (trained part of the model), which converts its tensors between the network and training.

        It is ``carried``, or a :class:`WholeCarrier` if that is None.
        """
        return self.carried or WholeCarrier(self.weights)

    @property
    def training_module(self) -> nn.Sequential:
        """Copy of the suffix (trained part of the model) in training mode, with shapes but no values."""
        return self._modes[True]

    @cached_property
    def weights(self) -> Mapping[str, TensorSpec]:
        """Specs of all state tensors of the suffix (trained part of the model) by name, moving statistics included, in
        state order.
        """
        state = self.suffix.state_dict(keep_vars=True)
        return {name: TensorSpec.holding(tensor) for name, tensor in state.items()}

    @cached_property
    def trainable(self) -> tuple[str, ...]:
        """Names of the parameters of the suffix (trained part of the model) that require a gradient, in the module's
        order.
        """
        return tuple(name for name, parameter in self.suffix.named_parameters() if parameter.requires_grad)

    @cached_property
    def fixed(self) -> tuple[str, ...]:
        """Names of all state tensors that are not :attr:`trainable`: moving statistics and frozen parameters."""
        return tuple(name for name in self.weights if name not in self.trainable)

    @cached_property
    def buffers(self) -> tuple[str, ...]:
        """Names of the buffers of the suffix (trained part of the model), such as moving statistics, which the forward
        pass updates without a gradient.
        """
        own = dict(self.suffix.named_buffers(remove_duplicate=False))
        return tuple(name for name in self.fixed if name in own)

    @cached_property
    def kernels(self) -> frozenset[str]:
        """Names of the trainable kernels of conv, dense and recurrent layers, on which weight decay acts.

        Embeddings are left out (embracingfl.md 8, row 12).
        """
        embeddings = {
            f"{path}.weight" if path else "weight"
            for path, module in self.suffix.named_modules()
            if isinstance(module, nn.Embedding | nn.EmbeddingBag)
        }
        return frozenset(
            name for name in self.trainable if len(self.weights[name].shape) >= 2 and name not in embeddings
        )

    def batch(self, size: int) -> TensorSpec:
        """Return the spec of the input of the suffix (trained part of the model) for ``size`` samples: (size,
        *boundary.shape).
        """
        return self.boundary.rows(size)

    def others(self, size: int) -> Mapping[str, TensorSpec]:
        """Return the specs of the additional inputs of the suffix (trained part of the model), for ``size`` samples,
        by name.

        {} if it has only one input.
        """
        return {name: sample.rows(size) for name, sample in extra_inputs(self.suffix).items()}

    def labels(self, size: int) -> TensorSpec:
        """Return the spec of the labels of ``size`` samples.

        Raises:
            ModelError: The loss cannot read the suffix's output.
        """
        return self._label.rows(size)

    @cached_property
    def facts(self) -> Mapping[str, TensorSpec]:
        """Specs of statistics of the device's whole data set that training reads, by name after ``data.``.

        If ``masked``, ``class_counts``: local samples of each class, int64 (classes,). Else {}.
        """
        classes = self._label.below
        return {"class_counts": TensorSpec((classes,), torch.int64)} if self.masked and classes else {}

    @property
    def scalars(self) -> tuple[str, ...]:
        """Names of the scalars of the round that the loss reads, without the prefix ``hyper.``."""
        return self.loss.scalars if isinstance(self.loss, RoundScalarsLoss) else ()

    def with_loss(self, loss: Loss) -> Objective:
        """Return a copy of the objective with another ``loss`` for the same labels. Both share the model's modules."""
        other = copy.copy(self)
        object.__setattr__(other, "loss", loss)
        return other

    @cached_property
    def _label(self) -> TensorSpec:
        return self.loss.label(self._out)

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the metrics of an evaluation besides the loss, the main one first; () if there is none."""
        return metrics_of(self.loss, self._out)

    @cached_property
    def _out(self) -> TensorSpec:
        return output_spec(self.suffix, self.boundary)

    def noise(self, size: int) -> Mapping[str, TensorSpec]:
        """Return the specs of the uniform random tensors that a training step of ``size`` samples reads, by name.

        They are the random numbers of the carrier (:attr:`Carrier.noise`), and those of the layers, such as dropout.
        """
        return {**self.carrier.noise, **self._drawn(size)}

    def _drawn(self, size: int) -> Mapping[str, TensorSpec]:
        """Return the specs of the random numbers that the suffix (trained part of the model) draws for ``size``
        samples, by name.

        Names are equal for all sizes.
        """
        if size not in self._draws:
            self._draws[size] = random_inputs(self._modes[True], self.weights, self.batch(size))
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
        """Compute the training loss of a batch, without changing any argument.

        Args:
            params: Tensors by name, for each of :attr:`trainable`.
            buffers: Tensors by name, for each of :attr:`fixed`.
            x: Boundary samples, (B, *boundary).
            y: Labels of the shape and dtype of :meth:`labels`.
            noise: Uniform random tensors by name, of the specs of :meth:`noise`. None: the suffix draws from torch's
                generator.
            gates: Masks and thresholds of the carrier, by name.
            facts: Tensors of :attr:`facts`, by name.
            hyper: Scalars of :attr:`scalars`, by name.
            others: Tensors of the additional inputs by name, of the specs of :meth:`others`.

        Returns:
            (loss, correct, moved): the weighted mean loss (), the number of correct answers () float32, and the
            tensors :attr:`fixed` by name after the pass, with new moving statistics.

        Raises:
            ModelError: A tensor of ``params`` is missing.
        """
        loss = (
            self.loss.at(hyper or {})
            if isinstance(self.loss, RoundScalarsLoss) and self.scalars
            else self.loss
        )
        uniform = dict(noise or {})

        def run(training: bool) -> tuple[Tensor, Tensors]:
            """Run the suffix once, and return (output, tensors of :attr:`fixed` after the pass).

            It reads the carrier's weights for training or for inference.
            """
            read = self.carrier.effective(dict(params), dict(gates or {}), uniform, training=training)
            tensors = {**read, **{name: buffers[name].clone() for name in self.fixed}}
            with self._reading(uniform):
                out = self._output(tensors, x, others, training=True)
            if self.masked:
                out = without_absent(cast(ClassificationLoss, self.loss), out, (facts or {})["class_counts"])
            return out, {name: tensors[name].detach() for name in self.fixed}

        out, moved = run(training=True)
        if self.distilled is not None:
            losses = loss.each(out, y)
            part, (out, moved) = out, run(training=False)
            value = batch_mean(loss, loss.each(out, y) + self._distill(self.distilled, part, out, losses), y)
        else:
            value = training_loss(loss, out, y)
            moved = self.carrier.keep_idle(moved, {name: buffers[name] for name in self.fixed}, uniform)
        return value, loss.correct(out.detach(), y).sum(), moved

    def _distill(self, how: SelfDistillation, part: Tensor, whole: Tensor, losses: Tensor) -> Tensor:
        """Return the loss per sample (B,) of the narrower model, with a term that pulls its output to that of the
        whole submodel.

        Args:
            how: Weight and temperature.
            part: Output of the narrower model, (B, *out).
            whole: Output of the whole submodel, treated as a constant.
            losses: Loss per sample of ``part`` (B,).
        """
        logits = cast(ClassificationLoss, self.loss).logits
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
        """Return the sums of loss and metrics in inference over the rows whose ``mask`` is 1.

        They are scalars by the names of :func:`edgefl.models.losses.loss.sums_of`.

        Args:
            weights: Tensors by name; may hold more than the suffix needs.
            x: Boundary samples, (B, *boundary).
            y: Labels of the shape and dtype of :meth:`labels`.
            mask: (B,): 1 for rows that count, 0 for padding.
            gates: Masks and thresholds of the carrier, by name.
            others: Tensors of the additional inputs, by name.
        """
        return sums_of(self.loss, self.predict(weights, x, gates, others), y, mask)

    def predict(
        self,
        weights: Mapping[str, Tensor],
        x: Tensor,
        gates: Mapping[str, Tensor] | None = None,
        others: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """Return the output of the suffix (trained part of the model) in inference for ``x``, such as logits (B, classes).

        Args:
            weights: Tensors by name; may hold more than the suffix needs, such as the whole model.
            x: Boundary samples, (B, *boundary).
            gates: Masks and thresholds of the carrier, by name.
            others: Tensors of the additional inputs, by name.

        Raises:
            ModelError: A tensor of the suffix is missing.
        """
        tensors = {name: tensor for name, tensor in weights.items() if name in self.weights}
        read = self.carrier.effective(tensors, dict(gates or {}), {}, training=False)
        with TraceableMode():
            return self._output(read, x, others, training=False)

    def _reading(self, uniform: Mapping[str, Tensor]) -> AbstractContextManager[object]:
        """Return the mode to run the suffix (trained part of the model) in.

        In it, the suffix takes its random numbers from ``uniform``, by name.

        If ``uniform`` has none for the suffix, it draws from torch's generator.
        """
        numbers = {name: tensor for name, tensor in uniform.items() if name not in self.carrier.noise}
        if not numbers:
            return TraceableMode()
        # A caller with numbers has read the ports before. Inside a trace, no other run of the module is possible.
        names = next(iter(self._draws.values()), None) or self._drawn(2)
        return RandomInputMode.from_numbers(tuple(names), numbers)

    def _output(
        self, tensors: Tensors, x: Tensor, others: Mapping[str, Tensor] | None, *, training: bool
    ) -> Tensor:
        """Run the suffix (trained part of the model) on ``x`` and return its output.

        Args:
            tensors: State of the suffix by name. Changed in place: it gets the new buffers, and copies of integer
                counters.
            x: Boundary samples, (B, *boundary).
            others: Tensors of the additional inputs.
            training: True: run in training mode, and apply the hooks on gradients.

        Raises:
            ModelError: A tensor of the suffix is missing.
        """
        missing = [name for name in self.weights if name not in tensors]
        if missing:
            raise ModelError(f"the suffix needs {missing[0]!r}, which was not given", missing=missing)
        mode = self._modes[training]
        tensors |= input_tensors(mode, others or {})
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
        whole = counter_dtypes(mode)
        tensors |= round_counters(tensors, whole)
        # Rebound buffers are written back into `tensors`, which is how the new moving statistics get out.
        with restored_state(mode):
            out = cast(Tensor, torch.func.functional_call(mode, tensors, (x,)))
        for name in whole:
            tensors[name] = tensors[name].to(torch.float32)
        return out
