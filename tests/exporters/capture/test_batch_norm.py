"""Batch norm as one ONNX node: onnxruntime writes over its statistics inputs, which must cost nobody anything."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from edgefl.contract.algorithm import Function
from edgefl.contract.tensors import Tensors
from edgefl_export.capture.trace import capture
from edgefl_export.onnx.model import to_onnx
from edgefl_export.verify.graphs import verify
from tests.exporters.examples import op_types, pointwise, step_of

STATISTICS = torch.ops.aten._native_batch_norm_legit.no_stats


def norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float = 1e-5) -> Tensor:
    return F.batch_norm(x, None, None, weight, bias, training=True, eps=eps)


def outputs(function: Callable[[Tensors], Tensors], example: Tensors) -> dict[str, np.ndarray]:
    """What onnxruntime gives for ``example``."""
    made = pointwise(function, **{name.replace(".", "__"): tuple(t.shape) for name, t in example.items()})
    model = to_onnx(capture(made))
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    feeds = {port.name: example[port.name].numpy() for port in session.get_inputs()}
    found = session.run(None, feeds)
    return {name.removesuffix(".next"): value for name, value in zip(names(model), found, strict=True)}


def names(model: bytes) -> list[str]:
    return [value.name for value in onnx.load_from_string(model).graph.output]


def test_two_norms_of_one_tensor_are_each_right() -> None:
    def fn(t: Tensors) -> Tensors:
        x = t["batch.0.x"]
        return {
            "record.a": norm(x, t["state.w"], t["state.b"]),
            "record.b": norm(x, t["state.v"], t["state.b"]),
            "record.c": norm(x, None, None),
            "record.d": norm(x, t["state.w"], None, eps=0.1),
            "record.x": x * 2,
        }

    function = pointwise(fn, batch__0__x=(4, 3, 5, 5), state__w=(3,), state__v=(3,), state__b=(3,))
    verify(function, to_onnx(capture(function)), 0)


def test_their_saved_statistics_are_each_right() -> None:
    def fn(t: Tensors) -> Tensors:
        found = {}
        for name in ("w", "v"):
            y, mean, inverse = STATISTICS(t["batch.0.x"], t[f"state.{name}"], t["state.b"], True, 0.1, 1e-5)
            found |= {f"record.y{name}": y, f"record.m{name}": mean, f"record.i{name}": inverse}
        return found

    function = pointwise(fn, batch__0__x=(4, 3, 5, 5), state__w=(3,), state__v=(3,), state__b=(3,))
    verify(function, to_onnx(capture(function)), 0)


class Twice(nn.Module):
    """One norm on different inputs, and two norms of one input; their statistics move each time."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.shared, self.other = nn.BatchNorm2d(4), nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        z = self.shared(y) + self.other(y)
        return self.head(self.shared(z).relu().mean((2, 3)))


@functools.cache
def twice() -> tuple[Function, bytes]:
    function = step_of(Twice(), (3, 6, 6))
    return function, to_onnx(capture(function))


def test_one_module_applied_twice_trains_as_in_torch() -> None:
    report = verify(*twice(), 0)

    assert report.worst <= 1e-4 and not report.rounding


def test_a_second_run_gives_the_first_result_again() -> None:
    function, model = twice()
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    example = function.example(1)
    feeds = {port.name: example[port.name].numpy().copy() for port in session.get_inputs()}

    first = session.run(None, feeds)
    again = session.run(None, feeds)

    for one, two in zip(first, again, strict=True):
        np.testing.assert_array_equal(one, two)
    for name, array in feeds.items():
        np.testing.assert_array_equal(array, example[name].numpy())


@pytest.mark.parametrize("mean", [0.0, 1e3, -1e3])
def test_a_mean_far_from_zero_costs_no_digits_beyond_those_of_the_input(mean: float) -> None:
    """E[x^2] - E[x]^2 would lose all of them: float32 has seven, and the variance is a millionth of the square."""
    x = torch.randn(8, 3, 6, 6, generator=torch.Generator().manual_seed(0)) + mean
    weight = torch.tensor([1.0, -2.0, 0.5])

    found = outputs(
        lambda t: {"record.y": norm(t["batch.0.x"], t["state.w"], None)}, {"batch.0.x": x, "state.w": weight}
    )["record.y"]

    exact = norm(x.double(), weight.double(), None).numpy()
    np.testing.assert_allclose(found, exact, atol=2e-3 if mean else 1e-5)


@pytest.mark.parametrize("weight", [0.0, -0.0, float("inf")])
def test_a_channel_with_an_odd_weight_leaves_the_others_alone(weight: float) -> None:
    x = torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(1))
    w = torch.tensor([1.0, weight, 2.0])

    found = outputs(
        lambda t: {"record.y": norm(t["batch.0.x"], t["state.w"], None)}, {"batch.0.x": x, "state.w": w}
    )["record.y"]

    np.testing.assert_allclose(found, norm(x, w, None).numpy(), rtol=1e-4, atol=1e-5)


def test_statistics_are_no_array_that_another_node_reads() -> None:
    function = pointwise(
        lambda t: {"record.a": norm(t["batch.0.x"], t["state.w"], None)},
        batch__0__x=(4, 3, 5, 5),
        state__w=(3,),
    )
    model = to_onnx(capture(function))
    graph = onnx.load_from_string(model).graph

    assert "BatchNormalization" in op_types(model)
    for node in graph.node:
        if node.op_type == "BatchNormalization":
            statistics = set(node.input[3:])
            assert not statistics & {value.name for value in (*graph.input, *graph.initializer)}
