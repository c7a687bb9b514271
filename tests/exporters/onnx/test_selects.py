"""Masks of ReLU and of clamps: exactly where the comparison holds, in an op that onnxruntime runs on all threads."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from edgefl.contract.algorithm import Function
from edgefl.contract.tensors import Tensors, TensorSpec
from edgefl_export.memory.recompute import _is_expensive
from edgefl_export.onnx import model as model_module
from edgefl_export.onnx.model import to_onnx
from edgefl_export.onnx.target import OnnxTarget
from edgefl_export.operators import POSITIVE

SMALLEST = float(np.finfo(np.float32).tiny)
LARGEST = float(np.finfo(np.float32).max)
COUNT = 40
COMPARES = {"Cast", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Not", "Or", "Where"}

MASKED: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "relu6": F.relu6,
    "hardtanh": F.hardtanh,
    "narrow clamp": lambda x: F.hardtanh(x, 0.3, 0.30001),
    "threshold": lambda x: F.threshold(x, 0.7, 0.0),
    "above": lambda x: x * torch.where(x.detach() > -2.5, 3.0, 0.0),
    "below": lambda x: x * torch.where(x.detach() < 1.5, 3.0, 0.0),
    "up to": lambda x: x * torch.where(x.detach() <= 1.5, 3.0, 0.0),
    "in both passes": lambda x: torch.where(x.detach() < 1.5, x * 3.0, 0.0),
}

COMPARED = {"up to": "LessOrEqual", "in both passes": "Less"}


def gradient(fn: Callable[[Tensor], Tensor]) -> Function:
    def step(t: Tensors) -> Tensors:
        leaf = t["batch.0.x"].detach().requires_grad_()
        loss = fn(leaf).sum()
        return {"metric.loss": loss.detach(), "metric.grad": torch.autograd.grad(loss, leaf)[0]}

    return Function("gradient", step, {"batch.0.x": TensorSpec((COUNT,))})


@functools.cache
def model(name: str) -> bytes:
    return to_onnx(OnnxTarget().capture(gradient(MASKED[name])))


@functools.cache
def session(name: str) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(model(name), providers=["CPUExecutionProvider"])


def near(bound: float) -> list[float]:
    at = np.float32(bound)
    return [float(at), *(float(np.nextafter(at, np.float32(side))) for side in (-np.inf, np.inf))]


NUMBERS = st.sampled_from(
    [0.0, -0.0, SMALLEST, -SMALLEST, LARGEST, -LARGEST]
    + [number for bound in (6.0, 1.0, -1.0, 0.3, 0.30001, 0.7, -2.5, 1.5) for number in near(bound)]
) | st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=False)


@pytest.mark.sample(4)
@given(st.data())
@pytest.mark.parametrize("name", MASKED)
def test_a_gradient_passes_exactly_where_the_comparison_lets_it(name: str, data: st.DataObject) -> None:
    drawn = data.draw(st.lists(NUMBERS, min_size=1, max_size=5))
    x = torch.tensor((drawn * COUNT)[:COUNT])
    expected = gradient(MASKED[name])({"batch.0.x": x})["metric.grad"]

    found = session(name).run(None, {"batch.0.x": x.numpy()})[1]

    np.testing.assert_array_equal(found, expected.numpy())


@pytest.mark.parametrize("name", sorted(MASKED.keys() - COMPARED.keys()))
def test_a_mask_needs_no_op_that_runs_on_one_thread(name: str) -> None:
    graph = onnx.load_from_string(model(name)).graph
    constants = {each.name for each in graph.initializer}
    ops = {node.op_type for node in graph.node if not constants.issuperset(node.input)}

    assert "HardSigmoid" in ops
    assert not ops & COMPARES


@pytest.mark.parametrize("name", MASKED)
def test_torch_onnx_needs_to_decompose_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would trace the whole graph once more."""
    tries: list[bool] = []
    export = model_module._export
    monkeypatch.setattr(
        model_module,
        "_export",
        lambda lowered, decomposed: tries.append(decomposed) or export(lowered, decomposed),
    )

    to_onnx(OnnxTarget().capture(gradient(MASKED[name])))

    assert tries == [True]


def test_a_mask_may_be_computed_twice() -> None:
    lowered = OnnxTarget().capture(gradient(torch.relu))

    [mask] = lowered.module.graph.find_nodes(op="call_function", target=POSITIVE)

    assert not _is_expensive(mask)


@pytest.mark.parametrize(("name", "op"), COMPARED.items())
def test_a_bound_that_is_let_through_and_a_mask_that_waits_are_compared(name: str, op: str) -> None:
    ops = {node.op_type for node in onnx.load_from_string(model(name)).graph.node}

    assert "HardSigmoid" not in ops and op in ops
