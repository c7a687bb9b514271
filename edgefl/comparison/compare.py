"""Comparison of a user's module, trained by torch, with the model that was cut from it, trained as devices train it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from edgefl.comparison import graph_side, torch_side
from edgefl.comparison.conduct import SideEffects
from edgefl.comparison.diagnosis import difference_error
from edgefl.comparison.evolution import check_state, state_error
from edgefl.comparison.graph_side import GradientStep
from edgefl.comparison.inputs import ATTEMPTS, UserSamples, batches
from edgefl.comparison.key import key_of
from edgefl.comparison.sharing import check_sharing
from edgefl.comparison.torch_side import STORED, TrainingResult, largest, widen
from edgefl.contract.tensors import Tensors
from edgefl.errors import EdgeflError, ExportError, ModelError
from edgefl.models.python_state.snapshots import restoring, snapshot_of
from edgefl.models.source import ModelSource
from edgefl.models.spec import ModelSpec
from edgefl.models.user_code import user_errors, user_line_of
from edgefl.system.memory import release_freed
from edgefl_export.verify.rounding import nudge

STEPS = 3
"""Steps of training: what a step leaves in the module shows in the next ones."""
TOLERANCE, OF_MODEL = 2e-3, 1e-6
"""Allowed difference of a tensor: relative to its largest update, and to the largest of the model."""
ROUNDED = 1e-4
"""Allowed difference relative to the largest update of the model where both sides agree in float64: what is left then is
rounding, such as that of a bias in front of batch norm, whose gradient is zero."""
FACTOR = 2.0
"""A difference of as many times torch's own distance from float64 is rounding."""
_FEW, _MANY = 6, 12
_SMALL = 1_000_000

_agreed: WeakKeyDictionary[nn.Module, dict[object, bool]] = WeakKeyDictionary()
"""For each object that was compared, by how it was asked for: True if the model agreed whole only."""


@dataclass(frozen=True)
class Difference:
    """Tensor that differs after training by torch and by the graph.

    Attributes:
        tensor: name of the tensor in the user's module; ``loss`` for the loss.
        size: largest difference, divided by the largest update of the tensor. Infinity if torch does not train
            it, NaN if the graph gives values that are not finite.
        allowed: largest allowed difference, relative in the same way.
        follows: True for a loss that agrees in the first step. Its later difference is then an effect of another
            tensor's.
    """

    tensor: str
    size: float
    allowed: float
    follows: bool = False


def compare(spec: ModelSpec, data: UserSamples | None = None, seed: int = 0) -> ModelSpec:
    """Train the user's module by torch and the model cut from it as devices train it, and compare the results.

    Each takes three steps of SGD on the same batches and random numbers. Loss, gradients, parameters, buffers and the
    output in inference must agree, independent of the algorithm and tier that are compiled later. The result is
    cached for the module in this process. The module's state is restored.

    Args:
        spec: the model; one that was not cut from a module is returned as it is.
        data: the user's samples; if None, random samples are drawn.
        seed: seed of the samples and of the numbers that the module draws.

    Returns:
        ``spec``, or the same model as a single unit (a stage that is never split) if it agrees only then.

    Raises:
        ModelError: if training differs; it names the tensor, the submodule where the difference begins, and a
            remedy.
        ExportError: if the training step cannot be traced.
    """
    source = spec.source
    if source is None:
        return spec
    known, key = _agreed.setdefault(source.module, {}), key_of(spec, source, data)
    if key not in known:
        with restoring(snapshot_of(source.module, spec.loss)):
            known[key] = _whole_only(spec, source, data, seed)
    return _whole(spec, source) if known[key] else spec


def _whole_only(spec: ModelSpec, source: ModelSource, data: UserSamples | None, seed: int) -> bool:
    """Return False if the model agrees as it was cut, True if it agrees only as a single unit (stage of the model).

    Raises:
        ModelError: if it agrees in neither form.
        ExportError: if it can be traced in neither form.
    """
    try:
        _compare(spec, source, data, seed)
        return False
    except EdgeflError as error:
        if source.request.whole or isinstance(source.request.cuts, tuple) or error.details.get("refused"):
            raise
        reason = error
    try:
        _compare(_whole(spec, source), source, data, seed)
    except EdgeflError as error:
        # Whole it trains as torch does, and only inference differs: that is what people have to mend.
        raise (error if error.details.get("reason") == "inference" else reason) from None
    return True


def _whole(spec: ModelSpec, source: ModelSource) -> ModelSpec:
    """Return the model of ``spec`` as a single unit (stage of the model)."""
    request = source.request
    loss = request.loss if source.returned_loss is not None else spec.loss
    whole = source.split(replace(request, whole=True, loss=loss))
    return replace(
        spec, module=whole.module, global_names=whole.global_names, source=whole.source, loss=whole.loss
    )


def _compare(spec: ModelSpec, source: ModelSource, data: UserSamples | None, seed: int) -> None:
    rows = _MANY if sum(each.numel() for each in source.module.parameters()) < _SMALL else _FEW
    step = graph_side.step_of(spec, rows)
    # An error is raised again below, after those of torch's code.
    with suppress(ExportError), restoring(snapshot_of(source.module, spec.loss)):
        _ = step.joint  # before any result is held, because tracing takes memory
    conduct = SideEffects(source.module, spec.loss)
    found: tuple[Difference, Tensors, TrainingResult] | None = None
    finite = False
    for attempt in range(ATTEMPTS):
        samples = batches(spec, rows, STEPS, seed, attempt, data)
        by_torch = _by_torch(source, spec, samples, seed, conduct, optional=attempt + 1 < ATTEMPTS)
        conduct.check()
        if by_torch is None or not by_torch.is_finite:
            continue
        judge = _TorchTraining(source, samples, by_torch, seed)
        if not finite:
            check_sharing(source.module, conduct.tensors, by_torch, partial(judge.retrain, spec))
        finite = True
        release_freed()  # such as torch's activations
        by_graph = graph_side.train(spec, step, samples, by_torch)
        differences, certain = judge.differences(spec, step, by_graph)
        if not differences:
            check_state(source, spec.loss, samples[0], seed, conduct)
            judge.check_outside(spec, conduct)
            judge.check_inference(spec, step, by_graph)
            return
        found = found or (_first(differences), samples[0], by_torch)
        if certain:
            break
    if found is not None:
        difference, batch, by_torch = found
        told = difference.tensor, difference.size, difference.allowed
        raise difference_error(spec, source, step, told, batch, by_torch, conduct, seed)
    if not finite:
        raise ModelError(
            f"{type(source.module).__name__} gives no finite loss or gradient in torch on random samples, so training "
            "cannot be compared: give `data`, or check what it divides by and takes logarithms and roots of"
        )


def _first(differences: list[Difference]) -> Difference:
    """Return the difference to report: the loss of the first step if it differs, else the largest difference."""
    if differences[0].tensor == "loss" and not differences[0].follows:
        return differences[0]
    return max(differences, key=lambda each: (not each.follows, each.size))


def _by_torch(
    source: ModelSource,
    spec: ModelSpec,
    samples: list[Tensors],
    seed: int,
    conduct: SideEffects,
    *,
    optional: bool,
) -> TrainingResult | None:
    """Train the module by torch, and record its side effects in ``conduct``.

    Args:
        source: the user's module.
        spec: the model, for its loss.
        samples: inputs and labels of each step by name.
        seed: seed of the numbers that the module draws.
        conduct: observer of side effects.
        optional: True to return None if the module raises an error on these samples.

    Raises:
        ModelError: if the module raises an error and ``optional`` is False.
    """
    try:
        with conduct.installed():
            return torch_side.train(source, spec.loss, samples, seed, around=conduct.watching)
    except EdgeflError:
        raise
    except Exception as error:
        if optional:
            return None
        place = user_line_of(error)
        name = type(source.module).__name__
        raise ModelError(
            f"{name} fails in torch on random samples: {type(error).__name__}: {error}"
            + (f" (at {place})" if place else "")
            + _other_dtype(source),
            model=spec.name,
            source=place,
        ) from error


def _other_dtype(source: ModelSource) -> str:
    """Return a sentence of advice if the module has weights in another dtype than float32, the dtype of devices; else
    "".
    """
    for name, each in source.module.named_parameters():
        if each.is_floating_point() and each.dtype != torch.float32:
            return f"; {name!r} is {each.dtype}, expected torch.float32: call float() on the module before it is compiled"
    return ""


@dataclass(frozen=True, eq=False)
class _TorchTraining:
    """Training of the user's module by torch, as the reference for the graph.

    Attributes:
        source: the user's module.
        samples: inputs and labels of each step by name.
        by_torch: result of the training.
        seed: seed of the numbers that the module draws.
    """

    source: ModelSource
    samples: list[Tensors]
    by_torch: TrainingResult
    seed: int

    def check_outside(self, spec: ModelSpec, conduct: SideEffects) -> None:
        """Raise ModelError if the module uses state outside of Python (such as a file) and training again gives other
        losses.
        """
        if conduct.outside and not np.allclose(
            self.retrain(spec).losses, self.by_torch.losses, rtol=1e-5, atol=1e-7
        ):
            raise state_error(
                self.source.module, conduct, conduct.outside[0], "training again gives another loss"
            )

    def check_inference(self, spec: ModelSpec, step: GradientStep, by_graph: TrainingResult) -> None:
        """Raise ModelError if the outputs of model and module in inference differ after training.

        Args:
            spec: the model.
            step: gradient step of the model.
            by_graph: training by the graph.
        """
        name = type(self.source.module).__name__
        with user_errors(f"{name} fails in inference where it runs in torch"):
            size = self._inference_error(spec, step, self.by_torch, by_graph.state)
            if size <= TOLERANCE:
                return
            with suppress(EdgeflError):
                exact = self.retrain(spec, double=True)
                size = self._inference_error(spec, step, exact, widen(spec.weights), double=True)
        if size > TOLERANCE:
            raise ModelError(
                f"{name} would give another output in inference than in torch: after three steps of training it differs "
                f"by {size:.1%} of its largest entry (allowed {TOLERANCE:.1%}). Expected eval() to switch modes only, "
                "and parameters and buffers that hold all numbers of training; keep statistics in float buffers "
                "(register_buffer), and merge weights in forward, not in train()",
                size=size,
                allowed=TOLERANCE,
                reason="inference",
            )

    def _inference_error(
        self,
        spec: ModelSpec,
        step: GradientStep,
        by_torch: TrainingResult,
        start: Tensors,
        *,
        double: bool = False,
    ) -> float:
        wanted = by_torch.output
        if wanted is None or not wanted.isfinite().all():
            return 0.0
        weights = graph_side.weights_of(spec, start, by_torch)
        found = graph_side.infer(spec, step, self.samples[-1], weights, double=double)
        error = _distance(wanted, found) if wanted.shape == found.shape else float("inf")
        return error / max(largest(wanted), 1e-6)

    def retrain(self, spec: ModelSpec, *, double: bool = False) -> TrainingResult:
        """Train by torch once more on the same samples, with the same learning rate, and return the result.

        ``double``: compute in float64.
        """
        rate = self.by_torch.rate
        return torch_side.train(self.source, spec.loss, self.samples, self.seed, rate=rate, double=double)

    def differences(
        self, spec: ModelSpec, step: GradientStep, by_graph: TrainingResult
    ) -> tuple[list[Difference], bool]:
        """Return (tensors that the traced ``step`` trained differently, True if a difference is certain).

        If tensors differ, both sides train again in float64. A difference in float64 is certain. If they agree in
        float64, a tensor may differ in float32 by ``FACTOR`` times torch's own distance from float64. In deep models,
        rounding decides at many kinks (of a ReLU or a maximum), and each side may decide otherwise. So if torch's own
        gradients differ between float32 and float64 beyond the tolerance, float64 alone decides about gradients; the
        loss has no kinks. For code that runs in float32 only, slightly changed samples replace float64.
        """
        by_torch = self.by_torch
        found = _differences(spec, by_torch, by_graph, {})
        if not found:
            return [], True
        is_single = False
        try:
            exact = self.retrain(spec, double=True)
            strayed = _float32_drift(self.retrain(spec), exact)
            graph = graph_side.train(spec, step, self.samples, exact, double=True)
        except Exception:  # any code may come
            is_single, strayed = True, self._sample_drift(spec)
        else:
            if real := _differences(spec, exact, graph, {}):
                return real, exact.is_finite
        left = _differences(spec, by_torch, by_graph, strayed, of_model=ROUNDED)
        if left and left[0].tensor != "loss" and by_graph.is_finite and _is_kinked(by_torch, strayed):
            return [], True
        return left, is_single

    def _sample_drift(self, spec: ModelSpec) -> Mapping[str, float]:
        """Return the distance that torch's result moves if the samples change by rounding; keys as in
        :func:`_float32_drift`.

        Empty if the module raises an error on the changed samples.
        """
        rounded = [nudge(batch, number) for number, batch in enumerate(self.samples)]
        try:
            return _float32_drift(self.retrain(spec), replace(self, samples=rounded).retrain(spec))
        except Exception:  # such as for whole numbers in float32
            return {}


def _float32_drift(by_torch: TrainingResult, exact: TrainingResult) -> Mapping[str, float]:
    """Return the largest absolute differences between torch's results in float32 and in float64.

    The keys are ``loss``, and ``gradients.NAME`` for each parameter.
    """
    strayed = {"loss": max(abs(a - b) for a, b in zip(by_torch.losses, exact.losses, strict=True))}
    for name, mine in by_torch.gradients.items():
        strayed[f"gradients.{name}"] = _distance(mine, exact.gradients.get(name))
    return strayed


def _is_kinked(by_torch: TrainingResult, strayed: Mapping[str, float]) -> bool:
    """Return True if the difference between float32 and float64 in one of torch's own gradients exceeds the tolerance.

    ``strayed``: these differences, as :func:`_float32_drift` returns them.
    """
    most = max(by_torch.sizes.values(), default=0.0)
    return any(
        strayed.get(f"gradients.{name}", 0.0) > TOLERANCE * size + OF_MODEL * most
        for name, size in by_torch.sizes.items()
    )


def _distance(one: Tensor, other: Tensor | None) -> float:
    if other is None or one.numel() == 0:
        return 0.0
    if not one.is_floating_point() and not one.is_complex():
        one, other = one.double(), other.double()
    return float((one - other).abs().max())


def _differences(
    spec: ModelSpec,
    by_torch: TrainingResult,
    by_graph: TrainingResult,
    strayed: Mapping[str, float],
    of_model: float = OF_MODEL,
) -> list[Difference]:
    """Return the tensors that differ by more than allowed: the loss first, then in the order of the module.

    Args:
        spec: the model.
        by_torch: training by torch.
        by_graph: training by the graph.
        strayed: error of torch itself, from :func:`_float32_drift`; differences of its size are allowed.
        of_model: allowed difference as a fraction of the largest gradient in the model.
    """
    found: list[Difference] = []
    floor = of_model * max(by_torch.sizes.values(), default=0.0)
    for number, (mine, its) in enumerate(zip(by_torch.losses, by_graph.losses, strict=True)):
        allowed = max(TOLERANCE * abs(mine) + 1e-6, FACTOR * strayed.get("loss", 0.0))
        if not abs(mine - its) <= allowed:
            size = _relative(abs(mine - its), abs(mine))
            found.append(Difference("loss", size, _relative(allowed, abs(mine)), follows=number > 0))
            break
    initial = spec.weights
    for name, ours in spec.global_names.items():
        excused = FACTOR * strayed.get(f"gradients.{name}", 0.0)
        rest = by_torch.gradients.get(name)
        if rest is not None:  # of torch's sum of gradients without the graph's
            difference = _judge(name, largest(rest), by_torch.sizes.get(name, 0.0), floor, excused)
            if difference is not None:
                found.append(difference)
                continue
        after = by_torch.state.get(name)
        if after is None:
            continue
        before = initial[ours]
        after = after.to(before.dtype)
        stored, rate = STORED * largest(before), by_torch.rate
        error, size = _distance(after, by_graph.state[ours]), largest(after - before)
        difference = _judge(name, error, size, rate * floor + stored, rate * excused)
        if difference is not None:
            found.append(difference)
    return found


def _judge(name: str, error: float, size: float, floor: float, excused: float) -> Difference | None:
    """Return the difference of tensor ``name``, or None if ``error`` is small enough.

    Args:
        name: name of the tensor.
        error: largest absolute difference.
        size: largest update of the tensor.
        floor: absolute difference that is always allowed.
        excused: absolute difference that torch's own rounding explains.
    """
    allowed = max(TOLERANCE * size + floor, excused)
    if error <= allowed:
        return None
    unit = size if size > floor else 0.0  # what is smaller is rounding of a gradient that is zero
    return Difference(name, _relative(error, unit), _relative(allowed, unit))


def _relative(error: float, unit: float) -> float:
    """Return ``error`` / ``unit``; infinity for a unit of 0, NaN if the error is not finite."""
    if not math.isfinite(error):
        return math.nan
    return error / unit if unit else math.inf
