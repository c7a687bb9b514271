"""Convolutions on the blocked layout compute what they did, whatever the block of this processor is."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import NodeProto, TensorProto, helper, numpy_helper
from torch import Tensor, nn

from edgefl.models.layers.recurrent import Gru
from edgefl_export.onnx.blocked.images import write_blocked
from edgefl_export.onnx.model import to_onnx
from edgefl_export.onnx.target import OnnxTarget
from edgefl_export.onnx.values import LAYOUT, GraphValues, live_peak
from edgefl_export.verify.graphs import verify
from tests.exporters.examples import BATCH, run_onnx, step_of

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


@pytest.mark.parametrize("case", CASES)
def test_it_gives_what_the_graph_gave(case: str) -> None:
    x, w, options = CASES[case]
    random = np.random.default_rng(0)
    arrays = {
        name: random.standard_normal(shape).astype(np.float32)
        for name, shape in {"x": x, "w": w, "b": w[:1]}.items()
    }
    own = model(x, w, options)

    other = write_blocked(own)

    assert other is not None and other == write_blocked(own)
    domains = [node.domain for node in onnx.load_from_string(other).graph.node if node.op_type == "Conv"]
    assert domains == [LAYOUT] * 2
    for mine, theirs in zip(run_onnx(other, arrays), run_onnx(own, arrays), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", LEFT)
def test_what_gains_nothing_is_left_alone(case: str) -> None:
    assert write_blocked(model(*LEFT[case], bias=False)) is None


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

    other = write_blocked(own)

    assert (other is not None) == fits
    if other is not None:
        np.testing.assert_allclose(run_onnx(other, arrays)[0], run_onnx(own, arrays)[0], rtol=1e-4, atol=1e-4)


def test_the_input_gradient_of_a_large_kernel_is_a_convolution_there() -> None:
    """A transposed one, with the attributes that torch.onnx writes."""
    layers = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 32, 5, padding=2), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    function = step_of(nn.Sequential(*layers), (3, 12, 12))
    own = to_onnx(OnnxTarget().capture(function))

    other = write_blocked(own)

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

    other = write_blocked(own)

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

    other = write_blocked(bytes(proto.SerializeToString()))

    assert other is not None
    assert any(
        node.op_type == "Concat" and len(node.input) == 9 for node in onnx.load_from_string(other).graph.node
    )


# -- what stands between convolutions stays on the blocked layout where that pays --------------------------


CHANNELS, SIDE = 16, 6
IMAGES = (4, CHANNELS, SIDE, SIDE)
SHAPES = {"x": IMAGES, "w": (CHANNELS, CHANNELS, 3, 3), "z": IMAGES} | dict.fromkeys(
    ("scale", "bias", "mean", "variance"), (CHANNELS,)
)
NUMBERS = {
    "two": np.float32(2.0),
    "one": np.ones(1, np.float32),
    "per_channel": np.linspace(-1, 1, CHANNELS, dtype=np.float32).reshape(CHANNELS, 1, 1),
    "with_batch": np.linspace(-1, 1, CHANNELS, dtype=np.float32).reshape(1, CHANNELS, 1, 1),
    "per_row": np.linspace(-1, 1, SIDE, dtype=np.float32),
    "axes": np.array([0, 2, 3]),
    "positions": np.array([2, 3]),
    "flat": np.array([-1]),
    "zero": np.array([0]),
    "first": np.array([1]),
    "sizes": np.array(IMAGES),
    "halves": np.array([8, CHANNELS // 2, SIDE, SIDE]),
}


def node(op: str, inputs: str, outputs: str, **options: Any) -> NodeProto:
    return helper.make_node(op, inputs.split(), outputs.split(), **options)


def between(*nodes: NodeProto, results: str = "end") -> bytes:
    """u is a convolution of x; v, which the nodes make of it, is read by another, whose result is ``end``."""
    convolved = {"kernel_shape": [3, 3], "pads": [1] * 4}
    first, last = node("Conv", "x w", "u", **convolved), node("Conv", "v w", "end", **convolved)
    made = [first, *nodes, last] if any("v" in each.output for each in nodes) else [first, *nodes]
    read = {name for each in made for name in each.input}
    values = {name: helper.make_tensor_value_info(name, TensorProto.FLOAT, s) for name, s in SHAPES.items()}
    graph = helper.make_graph(
        made,
        "between",
        [value for name, value in values.items() if name in read],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in results.split()],
        [numpy_helper.from_array(np.asarray(array), name) for name, array in NUMBERS.items() if name in read],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    return bytes(onnx.shape_inference.infer_shapes(model).SerializeToString())


def blocked_images_run(model: bytes) -> list[Any]:
    random = np.random.default_rng(0)
    arrays = {name: random.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}
    arrays["variance"] = np.abs(arrays["variance"])
    return run_onnx(model, arrays)


def assert_alike(model: bytes, other: bytes) -> None:
    for mine, theirs in zip(blocked_images_run(model), blocked_images_run(other), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5 * float(np.abs(theirs).max()))


def counted(model: bytes) -> Counter[str]:
    """Ops of a model, but for what brings weights into the layout."""
    nodes = onnx.load_from_string(model).graph.node
    weights = {"w"}  # and what is made of it
    for each in nodes:
        if each.op_type in ("ReorderInput", "Reshape") and each.input[0] in weights:
            weights.update(each.output)
    return Counter(each.op_type for each in nodes if not weights & {*each.output})


def waiting(x: str, trigger: str, sizes: str, result: str) -> tuple[NodeProto, ...]:
    """x in a shape, once the trigger is there: see :func:`edgefl_export.onnx.ops.after`."""
    return (
        node("Reshape", f"{trigger} flat", "all"),
        node("Slice", "all zero first", "one_of_them"),
        node("IsNaN", "one_of_them", "is_nan"),
        node("Cast", "is_nan", "whole", to=TensorProto.INT64),
        node("Mul", "whole zero", "nothing"),
        node("Add", f"{sizes} nothing", "shape"),
        node("Reshape", f"{x} shape", result),
    )


STATISTICS = {"training_mode": 1, "momentum": 0.0}

STAYS: dict[str, tuple[NodeProto, ...]] = {
    "entry by entry": (
        node("Relu", "u", "a"),
        node("HardSigmoid", "a", "b", alpha=0.5),
        node("Clip", "b two", "v"),
    ),
    "ReLU alone": (node("Relu", "u", "v"),),
    "pairs": (node("Tanh", "u", "a"), node("Sub", "a u", "b"), node("Mul", "u b", "v")),
    "a number": (node("Mul", "two u", "a"), node("Add", "a one", "v")),
    "numbers of channels": (
        node("Mul", "u per_channel", "a"),
        node("Sub", "a with_batch", "b"),
        node("Add", "per_channel b", "v"),
    ),
    "batch norm of given statistics": (
        node("BatchNormalization", "u scale bias mean variance", "v", epsilon=0.1),
    ),
    "batch norm": (
        node("BatchNormalization", "u scale bias mean variance", "a m s", **STATISTICS),
        node("Relu", "a", "v"),
    ),
    "what waits": (node("Tanh", "u", "a"), *waiting("a", "u", "sizes", "v")),
}


@pytest.mark.parametrize("case", STAYS)
def test_it_stays_on_the_layout(case: str) -> None:
    results = "end m s" if case == "batch norm" else "end"
    own = between(*STAYS[case], results=results)

    other = write_blocked(own, room=math.inf)

    assert other is not None and other == write_blocked(own, room=math.inf)
    ops = counted(other)
    assert (ops["ReorderInput"], ops["ReorderOutput"], ops["BatchNormalization"]) == (1, 1, 0)
    assert_alike(other, own)


COMES_OUT: dict[str, tuple[tuple[NodeProto, ...], str, tuple[int, int]]] = {
    "what another op reads, once": (
        (node("Softmax", "u", "a"), node("Softmax", "u", "b", axis=1)),
        "a b",
        (1, 1),
    ),
    "a result": ((node("Relu", "u", "v"),), "v end", (1, 2)),
    "before what ends elsewhere": (
        (node("Tanh", "u", "a"), node("Neg", "a", "c"), node("Softmax", "c", "b")),
        "b",
        (1, 1),
    ),
    "what waits, in another shape": (
        (*waiting("u", "z", "halves", "a"), node("Transpose", "a", "b", perm=[0, 2, 3, 1])),
        "b",
        (1, 1),
    ),
    "a norm that is computed again elsewhere": (
        (
            node("BatchNormalization", "u scale bias mean variance", "v m s", **STATISTICS),
            *waiting("u", "v", "sizes", "u2"),
            node("Neg", "mean", "m0"),
            node("Neg", "m0", "s0"),
            node("BatchNormalization", "u2 scale bias m0 s0", "a m2 s2", **STATISTICS),
            node("Softmax", "a", "b"),
        ),
        "end b",
        (2, 2),
    ),
    "a number for each row": ((node("Mul", "u per_row", "v"),), "end", (2, 2)),
    "channels divided": ((node("Div", "u per_channel", "v"),), "end", (2, 2)),
    "what comes from outside goes in": ((node("Add", "u z", "v"),), "end", (2, 1)),
    "not for what no convolution reads": ((node("Add", "u z", "a"),), "a", (1, 1)),
    "sums": ((node("Mul", "u u", "a"), node("ReduceSum", "a axes", "b", keepdims=0)), "b", (1, 0)),
    "sums with their axes": ((node("ReduceSum", "u axes", "b"),), "b", (1, 0)),
    "sums over positions alone": ((node("ReduceSum", "u positions", "b"),), "b", (1, 1)),
    "channels last": ((node("Transpose", "u", "a", perm=[0, 2, 3, 1]),), "a", (1, 1)),
    "statistics mixed with given ones": (
        (
            node("Neg", "mean", "m0"),
            node("BatchNormalization", "u scale bias m0 variance", "v m s", training_mode=1, momentum=0.5),
        ),
        "end m s",
        (2, 2),
    ),
}


@pytest.mark.parametrize("case", COMES_OUT)
def test_it_comes_out_where_it_has_to(case: str) -> None:
    nodes, results, (brought, taken) = COMES_OUT[case]
    own = between(*nodes, results=results)

    other = write_blocked(own, room=math.inf)

    assert other is not None
    ops = counted(other)
    assert (ops["ReorderInput"], ops["ReorderOutput"]) == (brought, taken)
    assert "channels last" not in case or not ops["Transpose"]
    if case == "before what ends elsewhere":
        [out] = [each for each in onnx.load_from_string(other).graph.node if each.op_type == "ReorderOutput"]
        assert out.output[0] == "u"
    assert_alike(other, own)


def test_what_would_take_memory_leaves_it_to_convolutions() -> None:
    """The other operand in both layouts, beside what is added."""
    own = between(node("Add", "u z", "a"), node("Mul", "a z", "b"), node("Add", "b z", "v"))

    anywhere, here = write_blocked(own, room=math.inf), write_blocked(own)

    assert anywhere is not None and here is not None
    found = [(counted(each)["ReorderInput"], counted(each)["ReorderOutput"]) for each in (anywhere, here)]
    assert found == [(2, 1), (2, 2)]
    assert_alike(here, own)


def sized(nodes: list[NodeProto], **sizes: int) -> GraphValues:
    """A graph of which these values have so many numbers."""
    known = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [size]) for name, size in sizes.items()]
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in ("x", "sizes")]
    return GraphValues(helper.make_graph(nodes, "g", inputs, [], value_info=known))


def test_values_hold_memory_to_their_last_reader() -> None:
    """Views have none of their own."""
    nodes = [
        node("Neg", "x", "a"),  # a
        node("Reshape", "a sizes", "b"),
        node("Neg", "a", "c"),  # a c
        node("Neg", "b", "d"),  # a c d
        node("Add", "c d", "e"),  # c d e
    ]

    assert live_peak(sized(nodes, a=5, c=1, d=1, e=4)) == 7
    assert live_peak(sized(nodes, a=1, c=3, d=3, e=4)) == 10


class Residual(nn.Module):
    """Two units and what goes past them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, CHANNELS, 3, padding=1, bias=False)
        self.units = nn.ModuleList(
            nn.Sequential(nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False), nn.BatchNorm2d(CHANNELS))
            for _ in range(2)
        )
        self.head = nn.Linear(CHANNELS, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        for unit in self.units:
            x = (x + unit(x)).relu()
        return self.head(x.mean((2, 3)))  # type: ignore[no-any-return]


class Read(nn.Module):
    """Convolutions whose rows a recurrent layer reads, in a loop that reads weights from around it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (
            nn.Conv2d(3, CHANNELS, 3, padding=1),
            nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1),
        )
        self.norm, self.rows, self.head = nn.BatchNorm2d(CHANNELS), Gru(CHANNELS * 8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.second(self.first(x).relu())).relu()
        return self.head(self.rows(x.permute(0, 3, 1, 2).flatten(2))[:, -1])  # type: ignore[no-any-return]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("module", "shape", "norms"), [(Residual, (3, 20, 20), (4, 0)), (Read, (3, 8, 8), (2, 2))]
)
def test_a_step_is_unchanged(module: type[nn.Module], shape: tuple[int, ...], norms: tuple[int, int]) -> None:
    """``norms``: before and after; one whose result no convolution reads stays outside."""
    function = step_of(module(), shape)
    own = to_onnx(OnnxTarget().capture(function))

    other = write_blocked(own)

    assert other is not None
    assert verify(function, other, 1).worst < 1e-4
    assert (counted(own)["BatchNormalization"], counted(other)["BatchNormalization"]) == norms
