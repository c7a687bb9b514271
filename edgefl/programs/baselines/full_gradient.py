"""The gradient of all local samples, batch by batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from edgefl.contract.program import Function
from edgefl.contract.tensors import Tensors, TensorSpec, prefixed, select
from edgefl.models.losses.loss import Loss, among, check_separable, sample_weights
from edgefl.models.spec import output_spec
from edgefl.objective.derivatives import gradient
from edgefl.objective.objective import Objective
from edgefl.objective.parts import SCALAR, dtype_of, step_ports
from edgefl.programs.baselines.steps import trained_specs


def accumulate(objective: Objective, batch: int) -> Function:
    """``state.full.*`` += the sum of the per-sample gradients at ``state.weights`` where ``batch.0.mask`` is 1, and
    ``state.seen`` += their number, or what they weigh: for a phase over the data, after which :func:`mean_of` is the mean
    over all samples.

    Weights and moving statistics stay as they are. It is a pass of training: batch norm normalizes by the batch, the rows
    that fill up the last one included, so that with it the result depends on how the samples fall into batches.
    ModelError for a loss that reduces a batch itself, because rows that fill one up would count.
    """
    out = output_spec(objective.suffix, objective.boundary)
    check_separable(objective.loss, out, "the gradient of all local samples (mimeadam, mimelite)")

    def fn(tensors: Tensors) -> Tensors:
        mask = tensors["batch.0.mask"]
        masked = objective.with_loss(_Masked(objective.loss, mask))
        loss, correct, grads, _ = gradient(masked, select(tensors, "state.weights"), tensors)
        full = select(tensors, "state.full")
        weight = sample_weights(masked.loss, tensors["batch.0.y"])
        if weight is None:
            rows, seen = len(mask), mask.sum()  # a mean over all rows, of which those without a mask are 0
            sums, loss = {name: rows * g for name, g in grads.items()}, rows * loss / seen
        else:
            seen = weight.sum()
            sums = {name: seen * g for name, g in grads.items()}
        metrics = {"metric.loss": loss, "metric.correct": correct}
        state = prefixed("state.full", {name: full[name] + added for name, added in sums.items()})
        return state | {"state.seen": tensors["state.seen"] + seen} | metrics

    ports = step_ports(objective, batch) | {"batch.0.mask": TensorSpec((batch,))}
    return Function("full_gradient", fn, ports | full_ports(objective))


def full_ports(objective: Objective) -> dict[str, TensorSpec]:
    """What :func:`accumulate` adds up."""
    return prefixed("state.full", trained_specs(objective)) | {"state.seen": SCALAR}


def none_yet(objective: Objective, state: Tensors) -> Tensors:
    """Its values before the first batch, in the dtype of ``state.weights.*``."""
    dtype = dtype_of(objective, state)
    return {name: spec.zeros(dtype) for name, spec in full_ports(objective).items()}


def mean_of(tensors: Tensors) -> Tensors:
    """The mean gradient over the samples that were seen, by name."""
    return {name: total / tensors["state.seen"] for name, total in select(tensors, "state.full").items()}


@dataclass(frozen=True)
class _Masked:
    """A loss, times ``mask`` (B,); where samples weigh differently, their weights times it."""

    loss: Loss
    mask: Tensor

    def each(self, out: Tensor, y: Tensor) -> Tensor:
        return torch.mul(among(self.loss, self.mask).each(out, y), self.mask)

    def correct(self, out: Tensor, y: Tensor) -> Tensor:
        return torch.mul(among(self.loss, self.mask).correct(out, y), self.mask)

    def label(self, out: TensorSpec) -> TensorSpec:
        return self.loss.label(out)

    def weight(self, y: Tensor) -> Tensor | None:
        weight = sample_weights(self.loss, y)
        return None if weight is None else weight * self.mask
