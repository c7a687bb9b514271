"""Convolutions on the blocked layout compute what they did, whatever the block of this processor is."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper
from torch import nn

from edgefl_export.onnx.blocked.images import blocked
from edgefl_export.onnx.model import to_onnx
from edgefl_export.onnx.target import OnnxTarget
from edgefl_export.onnx.values import LAYOUT
from edgefl_export.verify.graphs import verify
from tests.exporters.examples import BATCH, step_of

CASES: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "plain": ((8, 16, 14, 15), (32, 16, 3, 3), {"pads": [1, 1, 1, 1]}),
    "stride": ((8, 32, 16, 16), (16, 32, 3, 5), {"pads": [1, 2, 1, 2], "strides": [2, 1]}),
    "dilation": ((4, 16, 9, 9), (16, 16, 3, 3), {"dilations": [2, 2]}),
    "depthwise": ((2, 32, 8, 8), (32, 1, 3, 3), {"group": 32, "pads": [1, 1, 1, 1]}),
}
LEFT = {
    "one position": ((2, 16, 8, 8), (16, 16, 1, 1), {}),
    "odd channels": ((2, 24, 8, 8), (24, 24, 3, 3), {}),
    "groups": ((2, 32, 8, 8), (32, 16, 3, 3), {"group": 2}),
    "one axis": ((2, 16, 8), (16, 16, 3), {}),
    "a first layer": ((2, 3, 8, 8), (16, 3, 3, 3), {"pads": [1, 1, 1, 1]}),
}


def model(x: tuple[int, ...], w: tuple[int, ...], options: dict[str, Any], bias: bool = True) -> bytes:
    """Two convolutions that read one input, and an activation between."""
    value = helper.make_tensor_value_info
    inputs = [
        value("x", TensorProto.FLOAT, x),
        value("w", TensorProto.FLOAT, w),
        value("b", TensorProto.FLOAT, w[:1]),
    ]
    nodes = [
        helper.make_node("Conv", ["x", "w", *["b"] * bias], ["u"], **options),
        helper.make_node("Relu", ["u"], ["y"]),
        helper.make_node("Neg", ["w"], ["v"]),
        helper.make_node("Conv", ["x", "v"], ["z"], **options),
    ]
    outputs = [value(name, TensorProto.FLOAT, None) for name in "yz"]
    graph = helper.make_graph(nodes, "two", inputs, outputs)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    made = onnx.shape_inference.infer_shapes(made)
    return bytes(made.SerializeToString())


def run(data: bytes, arrays: dict[str, np.ndarray[Any, Any]]) -> list[np.ndarray[Any, Any]]:
    session = ort.InferenceSession(data, providers=["CPUExecutionProvider"])
    return session.run(None, {each.name: arrays[each.name] for each in session.get_inputs()})  # type: ignore[no-any-return]


@pytest.mark.parametrize("case", CASES)
def test_it_gives_what_the_graph_gave(case: str) -> None:
    x, w, options = CASES[case]
    random = np.random.default_rng(0)
    arrays = {
        name: random.standard_normal(shape).astype(np.float32)
        for name, shape in {"x": x, "w": w, "b": w[:1]}.items()
    }
    own = model(x, w, options)

    other = blocked(own)

    assert other is not None and other == blocked(own)
    domains = [node.domain for node in onnx.load_from_string(other).graph.node if node.op_type == "Conv"]
    assert domains == [LAYOUT] * 2
    for mine, theirs in zip(run(other, arrays), run(own, arrays), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", LEFT)
def test_what_gains_nothing_is_left_alone(case: str) -> None:
    assert blocked(model(*LEFT[case], bias=False)) is None


TRANSPOSED: dict[str, tuple[dict[str, Any], bool]] = {
    "same size": ({"pads": [2, 2, 2, 2]}, True),
    "sides differ": ({"pads": [0, 1, 2, 3], "dilations": [1, 2]}, True),
    "stride": ({"strides": [2, 2]}, False),
    "more padding than the kernel reaches": ({"pads": [5, 0, 5, 0]}, False),
}


@pytest.mark.parametrize("case", TRANSPOSED)
def test_a_transposed_convolution_is_one_with_the_kernel_turned_around(case: str) -> None:
    options, fits = TRANSPOSED[case]
    random, value = np.random.default_rng(0), helper.make_tensor_value_info
    arrays = {
        "x": random.standard_normal((2, 16, 14, 15)).astype(np.float32),
        "w": random.standard_normal((16, 32, 5, 5)).astype(np.float32),
        "b": random.standard_normal(32).astype(np.float32),
    }
    inputs = [value(name, TensorProto.FLOAT, array.shape) for name, array in arrays.items()]
    nodes = [helper.make_node("ConvTranspose", ["x", "w", "b"], ["y"], **options)]
    graph = helper.make_graph(nodes, "one", inputs, [value("y", TensorProto.FLOAT, None)])
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    own = bytes(onnx.shape_inference.infer_shapes(made).SerializeToString())

    other = blocked(own)

    assert (other is not None) == fits
    if other is not None:
        np.testing.assert_allclose(run(other, arrays)[0], run(own, arrays)[0], rtol=1e-4, atol=1e-4)


def test_the_input_gradient_of_a_large_kernel_is_a_convolution_there() -> None:
    """A transposed one, with the attributes that torch.onnx writes."""
    layers = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 32, 5, padding=2), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    function = step_of(nn.Sequential(*layers), (3, 12, 12))
    own = to_onnx(OnnxTarget().capture(function))

    other = blocked(own)

    assert "ConvTranspose" in {node.op_type for node in onnx.load_from_string(own).graph.node}
    assert other is not None
    assert "ConvTranspose" not in {node.op_type for node in onnx.load_from_string(other).graph.node}
    assert verify(function, other, 1).worst < 1e-4


DEPTHWISE: dict[str, dict[str, Any]] = {
    "plain": {"kernel_size": 3, "padding": 1},
    "stride": {"kernel_size": 3, "padding": 1, "stride": 2},
    "stride that leaves rows": {"kernel_size": 3, "stride": 2},
    "dilation": {"kernel_size": (3, 5), "padding": (2, 0), "dilation": (2, 1)},
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("case", DEPTHWISE)
def test_weight_gradients_of_depthwise_convolutions_stay_so(case: str) -> None:
    channels, side = 32, 18
    layer = nn.Conv2d(channels, channels, groups=channels, bias=False, **DEPTHWISE[case])
    function = step_of(nn.Sequential(layer, nn.AdaptiveAvgPool2d(1), nn.Flatten()), (channels, side, side))
    own = to_onnx(OnnxTarget().capture(function))

    other = blocked(own)

    assert other is not None
    nodes = onnx.load_from_string(other).graph.node
    groups = {
        helper.get_attribute_value(each) for node in nodes for each in node.attribute if each.name == "group"
    }
    assert BATCH * channels in groups  # the samples' channels side by side
    assert "Pad" not in {node.op_type for node in nodes}  # what the products read is gone
    assert verify(function, other, 1).worst < 1e-4


def test_sums_that_are_no_gradient_of_a_convolution_are_left_alone() -> None:
    """Windows in another order than a kernel's positions have."""
    layer = nn.Conv2d(32, 32, 3, groups=32, bias=False)
    function = step_of(nn.Sequential(layer, nn.AdaptiveAvgPool2d(1), nn.Flatten()), (32, 18, 18))
    proto = onnx.load_from_string(to_onnx(OnnxTarget().capture(function)))
    [joined] = [node for node in proto.graph.node if node.op_type == "Concat" and len(node.input) == 9]
    joined.input[0], joined.input[1] = joined.input[1], joined.input[0]

    other = blocked(bytes(proto.SerializeToString()))

    assert other is not None
    assert any(
        node.op_type == "Concat" and len(node.input) == 9 for node in onnx.load_from_string(other).graph.node
    )
