"""Comparison of a split model's gradient with that of the module that it was cut from."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from edgefl.contract.tensors import Tensors
from edgefl.models.spec import ModelSpec
from edgefl.objective.derivatives import gradient
from edgefl.objective.objective import Objective
from edgefl.submodels.output_side.submodel import OutputSide


def assert_trains_as_torch(
    module: nn.Module, spec: ModelSpec, expected: Tensor, batch: Tensors, cut: int = 0
) -> tuple[Tensors, Tensors]:
    """Assert that the units behind ``cut`` have the loss and the gradient that torch computes for the module.

    Args:
        module: the module that ``spec`` was cut from, whose pass computed ``expected``.
        spec: its units.
        expected: the loss, with its graph.
        batch: inputs and labels by name, such as ``x`` and ``y``; ``x`` lies at the boundary.
        cut: number of frozen units.

    Returns:
        The gradient and the moved statistics, by global name.
    """
    module.zero_grad()
    expected.backward()  # not autograd.grad, which reentrant checkpoints refuse
    state = {name: value.clone() for name, value in spec.module.state_dict().items()}
    ports = {f"batch.0.{name}": each for name, each in batch.items()}
    loss, _, found, moved = gradient(Objective.of(OutputSide(spec, cut)), state, ports)
    torch.testing.assert_close(loss, expected.detach())
    assert set(found) <= set(spec.global_names.values())
    for name, parameter in module.named_parameters():
        if (own := spec.global_names.get(name)) in found:
            torch.testing.assert_close(found[own], parameter.grad, rtol=1e-5, atol=1e-6)
    return found, moved
