"""A clamp's gradient asks the result in place of the input: the same masks, and the input waits no longer."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from edgefl.contract.tensors import Tensors
from edgefl_export.capture.graph import LoweredGraph
from edgefl_export.capture.trace import capture
from edgefl_export.onnx.model import to_onnx
from edgefl_export.verify.graphs import verify
from tests.exporters.examples import pointwise, step_of

_aten = torch.ops.aten


def compared(lowered: LoweredGraph) -> list[object]:
    """What the graph's comparisons with a bound read."""
    return [
        node.args[0].target
        for node in lowered.module.graph.nodes
        if node.target in (_aten.le.Scalar, _aten.ge.Scalar)
    ]


@pytest.mark.parametrize(
    "activation", [nn.ReLU6(), nn.ReLU6(inplace=True), nn.Hardtanh(), nn.Hardtanh(-2.0, 0.5)]
)
def test_gradients_of_clamps_read_what_the_next_layer_reads(activation: nn.Module) -> None:
    module = nn.Sequential(nn.Conv2d(3, 4, 3), activation, nn.Flatten(), nn.Linear(64, 3))
    step = step_of(module, (3, 6, 6))
    lowered = capture(step)
    assert compared(lowered) == [_aten.hardtanh.default] * 2
    verify(step, to_onnx(lowered), seed=0)


def test_masks_are_the_same_at_and_around_the_bounds() -> None:
    def gradient(tensors: Tensors) -> Tensors:
        x = tensors["batch.0.x"].detach().requires_grad_()
        [found] = torch.autograd.grad(F.relu6(x).sum(), [x])
        return {"record.g": found}

    x = torch.tensor([-1.0, -0.0, 0.0, 1e-45, 3.0, 6.0 - 5e-7, 6.0, 6.0 + 5e-7, torch.inf, -torch.inf])
    lowered = capture(pointwise(gradient, batch__0__x=(10,)))
    assert compared(lowered) == [_aten.hardtanh.default] * 2
    tensors = {"batch.0.x": x}
    torch.testing.assert_close(lowered(tensors), gradient(tensors), rtol=0, atol=0)


def test_comparisons_of_whole_numbers_stay() -> None:
    """A clamp of whole numbers rounds its bounds."""

    def masked(tensors: Tensors) -> Tensors:
        x = tensors["batch.0.x"].to(torch.int64)
        return {"record.y": F.hardtanh(x, -2, 2).float(), "record.m": ((x <= -2) | (x >= 2)).float()}

    lowered = capture(pointwise(masked, batch__0__x=(10,)))
    assert len(compared(lowered)) == 2 and _aten.hardtanh.default not in compared(lowered)


def test_comparisons_with_other_numbers_stay() -> None:
    def masked(tensors: Tensors) -> Tensors:
        x = tensors["batch.0.x"]
        return {"record.y": F.relu6(x), "record.m": ((x <= 1.0) | (x >= 5.0)).float()}

    lowered = capture(pointwise(masked, batch__0__x=(10,)))
    assert len(compared(lowered)) == 2 and _aten.hardtanh.default not in compared(lowered)
