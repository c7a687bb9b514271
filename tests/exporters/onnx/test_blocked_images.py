"""What stands between convolutions stays on the blocked layout where that pays, and computes what it did."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import NodeProto, TensorProto, helper, numpy_helper
from torch import Tensor, nn

from exporters.onnx import capture_for
from exporters.onnx.blocked import blocked
from exporters.onnx.model import to_onnx
from exporters.verify.graphs import verify
from tests.exporters.examples import step_of

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


def run(model: bytes) -> list[Any]:
    random = np.random.default_rng(0)
    arrays = {name: random.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}
    arrays["variance"] = np.abs(arrays["variance"])
    session = ort.InferenceSession(model, providers=["CPUExecutionProvider"])
    return list(session.run(None, {each.name: arrays[each.name] for each in session.get_inputs()}))


def assert_alike(model: bytes, other: bytes) -> None:
    for mine, theirs in zip(run(model), run(other), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5 * float(np.abs(theirs).max()))


def counted(model: bytes) -> Counter[str]:
    """Ops of a model, but for what brings weights into the layout."""
    nodes = onnx.load_from_string(model).graph.node
    weights = {"w"}  # and what is made of it
    for each in nodes:
        if each.op_type in ("ReorderInput", "Reshape") and each.input[0] in weights:
            weights.update(each.output)
    return Counter(each.op_type for each in nodes if not weights & {*each.output})


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
        node("BatchNormalization", "u scale bias mean variance", "a m s", training_mode=1, momentum=0.0),
        node("Relu", "a", "v"),
    ),
}


@pytest.mark.parametrize("case", STAYS)
def test_it_stays_on_the_layout(case: str) -> None:
    results = "end m s" if case == "batch norm" else "end"
    own = between(*STAYS[case], results=results)

    other = blocked(own)

    assert other is not None and other == blocked(own)
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
    "before what ends elsewhere": ((node("Relu", "u", "a"), node("Softmax", "a", "b")), "a b", (1, 1)),
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

    other = blocked(own)

    assert other is not None
    ops = counted(other)
    assert (ops["ReorderInput"], ops["ReorderOutput"]) == (brought, taken)
    assert "channels last" not in case or not ops["Transpose"]
    assert_alike(other, own)


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


def test_a_step_of_residual_units_is_the_same_step() -> None:
    """Between its convolutions nothing is left that runs on one thread."""
    function = step_of(Residual(), (3, 8, 8))
    own = to_onnx(capture_for(function))

    other = blocked(own)

    assert other is not None
    assert verify(function, other, 1).worst < 1e-4
    before, after = counted(own), counted(other)
    assert (before["BatchNormalization"], after["BatchNormalization"]) == (4, 0)
