"""Training of the model as devices run it: the traced step, with its gradient as it is exported."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property

import torch

from edgefl.comparison.torch_side import TrainingResult, widen
from edgefl.contract.algorithm import Function
from edgefl.contract.tensors import Tensors, TensorSpec, prefixed, select
from edgefl.models.spec import ModelSpec
from edgefl.models.torch_functions.storage import shape_error
from edgefl.objective.derivatives import gradient
from edgefl.objective.objective import Objective
from edgefl.submodels.output_side.submodel import OutputSide
from edgefl.system.memory import release_freed, without_collector
from edgefl.wire.bundle.manifest import SAMPLE
from edgefl_export.capture.graph import TracedFunction
from edgefl_export.capture.refusals import check_ops, drop_outside_writes
from edgefl_export.capture.trace import trace
from edgefl_export.verify.rounding import double_precision


@dataclass(frozen=True, eq=False)
class GradientStep:
    """Gradient step of a whole model on a fixed number of rows.

    Attributes:
        objective: loss of the model.
        function: function that maps weights and a batch to loss, gradients and updated buffers.
        noise: shape of each random draw by name, in order.
    """

    objective: Objective
    function: Function
    noise: dict[str, TensorSpec]

    @cached_property
    def joint(self) -> TracedFunction:
        """Traced step, forward and backward. It is traced at first use.

        Raises:
            ExportError: if it cannot be traced, or draws in a way that a graph cannot express.
        """
        with without_collector():
            joint = trace(self.function)
        check_ops(self.function, joint.module)
        drop_outside_writes(self.function, joint.module)
        release_freed()  # tracing frees copies of all weights
        return joint


def step_of(spec: ModelSpec, rows: int) -> GradientStep:
    """Return the gradient step of ``spec`` on ``rows`` samples."""
    objective = Objective.of(OutputSide(spec, 0))
    noise = dict(objective.noise(rows))
    batch = {"x": objective.batch(rows), "y": objective.labels(rows), **objective.others(rows)}

    names = {ours: name for name, ours in spec.global_names.items()}

    def step(tensors: Tensors) -> Tensors:
        weights = select(tensors, "weights")
        loss, _, gradients, moved = gradient(objective, weights, tensors)
        for name, value in moved.items():
            if value.shape != weights[name].shape:
                raise shape_error(f"buffer {names.get(name, name)!r}", weights[name], value)
        return {"metric.loss": loss, **prefixed("update", gradients), **prefixed("state.weights", moved)}

    inputs = {
        **prefixed("weights", dict(objective.weights)),
        **prefixed("batch.0", batch),
        **prefixed("noise", noise),
    }
    return GradientStep(objective, Function("train", step, inputs), noise)


def train(
    spec: ModelSpec,
    step: GradientStep,
    batches: Sequence[Tensors],
    torch_side: TrainingResult,
    *,
    double: bool = False,
) -> TrainingResult:
    """Run the traced ``step`` on each batch from the weights of ``spec``, with torch's learning rate and random numbers.

    The gradients are subtracted in place from ``torch_side.gradients``, which then hold the difference of both sums.
    This saves a copy of the weights.

    Args:
        spec: the model.
        step: gradient step of the model.
        batches: inputs and labels of each step by name.
        torch_side: training of the same batches by torch; its gradients are changed.
        double: True to compute in float64.

    Returns:
        The losses, and the weights after the steps as ``state``, by names in ``spec``.

    Raises:
        ExportError: if the step cannot be traced, or draws in a way that a graph cannot express.
    """
    joint = step.joint
    kind = {torch.float32: torch.float64} if double else {}
    weights = {
        name: value.to(kind.get(value.dtype, value.dtype), copy=True)
        for name, value in spec.weights.items()
        if name in step.objective.weights
    }
    names = {ours: name for name, ours in spec.global_names.items()}
    names |= {ours: name for name, ours in spec.global_names.items() if name in torch_side.gradients}
    trained = TrainingResult(rate=torch_side.rate)
    with torch.no_grad():
        for batch, stream in zip(batches, torch_side.streams, strict=True):
            tensors: Tensors = {
                **prefixed("weights", weights),
                # Units behind a cut may read the sample again.
                **prefixed("batch.0", {SAMPLE: batch["x"], **batch}),
                **prefixed("noise", stream.ports(step.noise)),
            }
            arguments = [
                tensors[name].to(kind.get(spec.dtype, spec.dtype)).reshape(spec.shape)
                for name, spec in step.function.inputs.items()
            ]
            with double_precision() if double else nullcontext():
                values = joint.module(*arguments)
            found = dict(zip(joint.outputs, values, strict=True))
            trained.losses.append(float(found["metric.loss"]))
            for name, moved in select(found, "state.weights").items():
                weights[name] = moved.clone()
            for ours, slope in select(found, "update").items():
                weights[ours].sub_(slope, alpha=trained.rate)
                if names.get(ours) in torch_side.gradients:
                    torch_side.gradients[names[ours]].sub_(slope)
                elif ours in names:
                    torch_side.gradients[names[ours]] = slope.neg()
            del values, found  # a step's gradients leave before the next one computes its own
    trained.state = weights
    return trained


def weights_of(spec: ModelSpec, start: Tensors, by_torch: TrainingResult) -> Tensors:
    """Return the weights of ``spec`` as torch trained them, by names in ``spec``.

    Args:
        spec: the model.
        start: weights to which torch's updates are added. If :func:`train` has subtracted the graph's gradients,
            these are the weights after the graph's steps, else those before the steps.
        by_torch: training by torch.
    """
    weights = dict(start)
    # A tied weight has several names; torch's training knows one of them.
    for name, ours in spec.global_names.items():
        if name in by_torch.state:
            weights[ours] = by_torch.state[name].to(weights[ours].dtype)
        elif name in by_torch.gradients:
            weights[ours] = weights[ours].sub(by_torch.gradients[name], alpha=by_torch.rate)
    return weights


def infer(
    spec: ModelSpec, step: GradientStep, batch: Tensors, weights: Tensors, *, double: bool = False
) -> torch.Tensor:
    """Return the output tensor of the model in inference for ``batch``.

    Args:
        spec: the model.
        step: gradient step of the model.
        batch: inputs by name.
        weights: weights of the model by name.
        double: True to compute in float64.
    """
    inputs = widen(dict(batch)) if double else dict(batch)
    # Units may read the sample again.
    others = {name: inputs[name] for name in spec.others} | {SAMPLE: inputs["x"]}
    with torch.no_grad(), double_precision() if double else nullcontext():
        return step.objective.predict(weights, inputs["x"], others=others)
