"""Chains of ops by rows compute in a loop what they did, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import NodeProto, TensorProto, helper, numpy_helper
from torch import Tensor, nn

from edgefl_export.onnx.model import to_onnx
from edgefl_export.onnx.rows import chains, write_loops
from edgefl_export.onnx.target import OnnxTarget
from edgefl_export.onnx.values import GraphValues, read_by
from edgefl_export.verify.graphs import verify
from tests.exporters.examples import run_onnx, step_of

ROWS, WIDE = 64, 8192
SHAPES = {"x": (ROWS, WIDE), "z": (ROWS, WIDE), "row": (ROWS, 1), "column": (WIDE,), "part": (1, WIDE)}
NUMBERS = {
    "two": np.float32(2.0),
    "last": np.array([1]),
    "first": np.array([0]),
    "one": np.array([1]),
    "flat": np.array([-1]),
    "halves": np.array([2 * ROWS, WIDE // 2]),
    "same": np.array([ROWS, WIDE]),
    "thirds": np.array([1, ROWS * WIDE]),
}


def node(op: str, inputs: str, outputs: str, **options: Any) -> NodeProto:
    return helper.make_node(op, inputs.split(), outputs.split(), **options)


def model(*nodes: NodeProto, results: str) -> bytes:
    values = {name: helper.make_tensor_value_info(name, TensorProto.FLOAT, s) for name, s in SHAPES.items()}
    read = set[str]().union(*map(read_by, nodes))
    graph = helper.make_graph(
        nodes,
        "chain",
        [value for name, value in values.items() if name in read],
        [onnx.ValueInfoProto(name=name) for name in results.split()],
        [numpy_helper.from_array(np.asarray(array), name) for name, array in NUMBERS.items() if name in read],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    return bytes(onnx.shape_inference.infer_shapes(made, strict_mode=True).SerializeToString())


def run(model: bytes) -> list[Any]:
    random = np.random.default_rng(0)
    arrays = {name: random.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}
    return run_onnx(model, arrays, as_written=True)


def loops(model: bytes) -> int:
    return sum(each.op_type == "Scan" for each in onnx.load_from_string(model).graph.node)


def assert_same(own: bytes, other: bytes | None, count: int = 1) -> None:
    assert other is not None and loops(other) == count
    onnx.checker.check_model(other, full_check=True)
    for mine, theirs in zip(run(own), run(other), strict=True):
        np.testing.assert_array_equal(mine, theirs)


CHAINS: dict[str, tuple[tuple[NodeProto, ...], str]] = {
    "entries": ((node("Exp", "x", "a"), node("Mul", "a z", "b"), node("Sqrt", "b", "c")), "c"),
    "broadcasts": (
        (
            node("Mul", "x row", "a"),
            node("Add", "a column", "b"),
            node("Sub", "b part", "c"),
            node("Mul", "c two", "d"),
        ),
        "d",
    ),
    "truth values": ((node("Less", "x z", "a"), node("Where", "a x two", "c"), node("Neg", "c", "d")), "d"),
    "along rows": (
        (
            node("Softmax", "x", "a", axis=-1),
            node("Mul", "a z", "b"),
            node("ReduceMax", "b last", "c", keepdims=1),
            node("Sub", "b c", "d"),
        ),
        "d",
    ),
    "views": (
        (
            node("Exp", "x", "a"),
            node("Reshape", "a halves", "b"),
            node("Neg", "b", "c"),
            node("Abs", "c", "d"),
        ),
        "d",
    ),
    "read elsewhere": (
        (
            node("Exp", "x", "a"),
            node("Reshape", "x halves", "v"),
            node("Mul", "a z", "b"),
            node("Tanh", "b", "c"),
            node("ReduceSum", "a first", "e"),
            node("Reshape", "c halves", "w"),
            node("Add", "v w", "f"),
            node("ReduceSum", "f first", "g"),
        ),
        "e g",
    ),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", CHAINS)
def test_a_loop_makes_the_same_numbers(name: str) -> None:
    nodes, results = CHAINS[name]
    # ``results`` themselves are ports, which a device may write where they are read
    ends = [node("ReduceSum", f"{each} first", f"{each}_end") for each in results.split()]
    own = model(*nodes, *ends, results=" ".join(end.output[0] for end in ends))

    assert_same(own, write_loops(own))


LEFT: dict[str, tuple[NodeProto, ...]] = {
    "one op": (node("Exp", "x", "c"),),
    "down the rows": (
        node("Softmax", "x", "a", axis=0),
        node("CumSum", "a first", "b"),
        node("Exp", "b", "c"),
    ),
    "all rows": (
        node("Exp", "x", "a"),
        node("ReduceMax", "a first", "b", keepdims=1),
        node("Sub", "x b", "c"),
    ),
    "small values": (node("Neg", "row", "a"), node("Exp", "a", "b"), node("Neg", "b", "c")),
    "a row of all": (
        node("Reshape", "x thirds", "v"),
        node("Neg", "v", "a"),
        node("Exp", "a", "b"),
        node("Neg", "b", "c"),
    ),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_no_chain_is_left(name: str) -> None:
    assert write_loops(model(*LEFT[name], node("ReduceSum", "c first", "end"), results="end")) is None


def test_ports_are_left() -> None:
    """A device may write state where it was read, so that a loop over it would read what it wrote."""
    own = model(node("Exp", "x", "a"), node("Mul", "a z", "b"), node("Sub", "x b", "end"), results="end")

    found = chains(GraphValues(onnx.load_from_string(own).graph))

    assert [chain.outputs for chain in found] == [("b",)]
    assert_same(own, write_loops(own))


def test_what_another_node_needs_before_ends_a_chain() -> None:
    """``e`` reads what begins the chain, and the chain's end waits for it."""
    own = model(
        node("Exp", "x", "a"),
        node("Neg", "a", "b"),
        node("ReduceSum", "b first", "e", keepdims=1),
        node("Mul", "b e", "c"),
        node("Tanh", "c", "d"),
        node("ReduceSum", "d first", "end"),
        results="end",
    )

    assert_same(own, write_loops(own), count=2)


def test_what_is_read_by_rows_and_whole_is_no_part() -> None:
    """Each of 64 rows meets all of them: in the loop there would be one."""
    square = helper.make_tensor_value_info("w", TensorProto.FLOAT, (ROWS, ROWS, 128))
    rows = helper.make_tensor_value_info("u", TensorProto.FLOAT, (ROWS, 128))
    nodes = [
        node("Exp", "u", "a"),
        node("Reshape", "a apart", "r"),
        node("Mul", "r w", "p"),
        node("Add", "p a", "q"),
        node("Abs", "q", "t"),
        node("ReduceSum", "t axes", "end", keepdims=0),
    ]
    numbers = {"apart": [ROWS, 1, 128], "axes": [0, 2]}
    constants = [numpy_helper.from_array(np.array(each), name) for name, each in numbers.items()]
    graph = helper.make_graph(nodes, "pairs", [square, rows], [onnx.ValueInfoProto(name="end")], constants)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    own = onnx.shape_inference.infer_shapes(made).SerializeToString()
    random = np.random.default_rng(0)
    arrays = {"w": random.random((ROWS, ROWS, 128), np.float32), "u": random.random((ROWS, 128), np.float32)}

    found = [run_onnx(each, arrays)[0] for each in (own, write_loops(own) or own)]

    np.testing.assert_allclose(found[0], found[1], rtol=1e-5)


UNARY = ("Exp", "Neg", "Tanh", "Abs", "Sigmoid")
BINARY = ("Add", "Sub", "Mul", "Max")


@given(st.data())
def test_any_graph_of_ops_by_entry_computes_the_same(data: st.DataObject) -> None:
    """Whatever reads what, and wherever sums over all rows stand between."""
    made, nodes = ["x", "z"], list[NodeProto]()
    for index in range(data.draw(st.integers(2, 8))):
        name, first = f"v{index}", data.draw(st.sampled_from(made))
        kind = data.draw(st.sampled_from(["unary", "binary", "binary", "view", "sum"]))
        if kind == "unary":
            nodes.append(node(data.draw(st.sampled_from(UNARY)), first, name))
        elif kind == "binary":
            second = data.draw(st.sampled_from([*made, "row", "column", "two"]))
            nodes.append(node(data.draw(st.sampled_from(BINARY)), f"{first} {second}", name))
        elif kind == "view":
            nodes += [
                node("Reshape", f"{first} halves", f"{name}h"),
                node("Neg", f"{name}h", f"{name}n"),
                node("Reshape", f"{name}n same", name),
            ]
        else:
            nodes += [
                node("ReduceMean", f"{first} first", f"{name}s", keepdims=1),
                node("Sub", f"{first} {name}s", name),
            ]
        made.append(name)
    nodes.append(node("ReduceSum", f"{made[-1]} first", "end"))
    own = model(*nodes, results="end")

    other = write_loops(own)

    if other is not None:
        assert_same(own, other, loops(other))


class Net(nn.Module):
    """Norms, an activation of many passes, and what goes past them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.rows, self.head = nn.Linear(32, 32), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.stem(x)).relu()
        x = x + nn.functional.gelu(self.rows(x))
        return self.head(x.mean((2, 3)))  # type: ignore[no-any-return]


def test_a_step_is_the_same_step() -> None:
    function = step_of(Net(), (3, 128, 32))
    own = to_onnx(OnnxTarget().capture(function))

    other = write_loops(own)

    assert other is not None and loops(other) > 1
    assert verify(function, other, 1).worst < 1e-4
    assert write_loops(own) == other
