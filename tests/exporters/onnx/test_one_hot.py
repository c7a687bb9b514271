"""Cross entropy's gradient: labels are added to what softmax takes, and nothing is laid out among zeros."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from edgefl.contract.algorithm import Function
from edgefl.contract.tensors import Tensors, TensorSpec
from edgefl_export.capture.trace import capture
from edgefl_export.onnx.model import to_onnx
from tests.exporters.examples import op_types

ROWS, CLASSES, IGNORED = 6, 700, 3
LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": F.cross_entropy,
    "sum": lambda x, y: F.cross_entropy(x, y, reduction="sum"),
    "ignoring one": lambda x, y: F.cross_entropy(x, y, ignore_index=IGNORED),
    "weighted": lambda x, y: F.cross_entropy(x, y, weight=torch.arange(CLASSES) / 7.0),
    "of sequences": lambda x, y: F.cross_entropy(x.unsqueeze(-1), y.unsqueeze(-1)),
}


VIEWED = "of sequences"
"""Its rows change their shape between the two, and it stays."""


def gradient_of(loss: Callable[[Tensor, Tensor], Tensor]) -> Function:
    def fn(t: Tensors) -> Tensors:
        x = t["batch.x"].detach().requires_grad_()
        value = loss(x, t["batch.y"])
        (grad,) = torch.autograd.grad(value, x)
        return {"metric.loss": value.detach(), "metric.grad": grad}

    ports = {"batch.x": TensorSpec((ROWS, CLASSES)), "batch.y": TensorSpec((ROWS,), torch.int64)}
    return Function("train", fn, ports, label_range=CLASSES)


def run(model: bytes, example: Tensors) -> list[Any]:
    session = ort.InferenceSession(model, providers=["CPUExecutionProvider"])
    return list(session.run(None, {name: value.numpy() for name, value in example.items()}))


@pytest.mark.parametrize("name", LOSSES)
def test_the_gradient_is_torch_s(name: str) -> None:
    function = gradient_of(LOSSES[name])
    example = function.example(2)
    example["batch.y"][0] = IGNORED
    model = to_onnx(capture(function))

    found = run(model, example)

    for mine, theirs in zip(found, function(example).values(), strict=True):
        np.testing.assert_allclose(mine, theirs.numpy(), rtol=1e-5, atol=1e-7)
    ops = op_types(model)
    assert ops.count("ScatterElements") == 1 and ("Sub" in ops) == (name == VIEWED)


def test_what_is_laid_out_for_something_else_too_stays() -> None:
    """The gradient at the logarithms is a result of its own."""

    def fn(t: Tensors) -> Tensors:
        x = t["batch.x"].detach().requires_grad_()
        logs = F.log_softmax(x, -1)
        inner, outer = torch.autograd.grad(F.nll_loss(logs, t["batch.y"]), [logs, x])
        return {"metric.inner": inner, "metric.outer": outer}

    ports = {"batch.x": TensorSpec((ROWS, CLASSES)), "batch.y": TensorSpec((ROWS,), torch.int64)}
    function = Function("train", fn, ports, label_range=CLASSES)
    example = function.example(1)
    model = to_onnx(capture(function))

    for mine, theirs in zip(run(model, example), function(example).values(), strict=True):
        np.testing.assert_allclose(mine, theirs.numpy(), rtol=1e-5, atol=1e-7)
    assert "Sub" in op_types(model)
