"""Chains that one node can say: fewer nodes, the same numbers, and no wait lost."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from onnx_ir.passes.common import RemoveUnusedNodesPass
from torch import Tensor, nn

from edgefl.contract.tensors import Tensors
from edgefl_export.capture.trace import capture
from edgefl_export.onnx.blocked.images import write_blocked
from edgefl_export.onnx.model import to_onnx
from edgefl_export.onnx.passes import CastsByType, MatchRanks, MergeChains, SumsToProducts
from edgefl_export.onnx.target import OnnxTarget
from edgefl_export.onnx.values import LAYOUT
from edgefl_export.verify.graphs import verify
from tests.exporters.examples import pointwise, run_onnx, step_of

SHAPE = (4, 6, 5)
X = np.arange(120, dtype=np.float32).reshape(SHAPE)
quickly = settings(deadline=None, max_examples=40)


class Chain:
    """``x -> node -> node -> ... -> y`` with constant integer arguments; more outputs on request."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []
        self.outputs: list[str] = []
        self.last = "x"

    def add(self, op: str, *arguments: Sequence[int], **attributes: int) -> Chain:
        names = []
        for numbers in arguments:
            names.append(f"c{len(self.constants)}")
            self.constants.append(numpy_helper.from_array(np.array(numbers, np.int64), names[-1]))
        result = f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, [self.last, *names], [result], **attributes))
        self.last = result
        return self

    def read(self) -> Chain:
        """Make the value so far an output."""
        self.outputs.append(self.last)
        return self

    def slice(self, starts: Sequence[int], ends: Sequence[int], axes: Sequence[int]) -> Chain:
        return self.add("Slice", starts, ends, axes, [1] * len(axes))

    def model(self) -> onnx.ModelProto:
        outputs = [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, None)
            for name in dict.fromkeys([*self.outputs, self.last])
        ]
        x = helper.make_tensor_value_info("x", TensorProto.FLOAT, SHAPE)
        graph = helper.make_graph(self.nodes, "chain", [x], outputs, self.constants)
        made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
        return onnx.shape_inference.infer_shapes(made)


def merged(model: onnx.ModelProto) -> onnx.ModelProto:
    found = ir.from_proto(model)
    MergeChains()(found)
    RemoveUnusedNodesPass()(found)
    proto = ir.to_proto(found)
    onnx.checker.check_model(proto, full_check=True)
    return proto


def ops(model: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node if node.op_type != "Constant"]


def run(model: onnx.ModelProto, x: Any = X) -> list[np.ndarray]:
    return run_onnx(model.SerializeToString(), {"x": x}, as_written=True)


def checked(chain: Chain) -> list[str]:
    """Ops that are left, after a look at the numbers."""
    model = chain.model()
    found = merged(model)
    for before, after in zip(run(model), run(found), strict=True):
        np.testing.assert_array_equal(after, before)
    return ops(found)


def test_slices_along_different_axes_become_one() -> None:
    assert checked(Chain().slice([1], [3], [0]).slice([2], [5], [1])) == ["Slice"]
    assert checked(Chain().slice([0], [2], [0]).slice([1], [6], [1]).slice([1], [2], [2])) == ["Slice"]


def test_slices_along_one_axis_stay() -> None:
    assert checked(Chain().slice([1], [4], [0]).slice([1], [2], [0])) == ["Slice", "Slice"]


def test_a_negative_axis_is_the_one_that_it_means() -> None:
    assert checked(Chain().slice([1], [4], [0]).slice([1], [3], [-2])) == ["Slice"]
    assert checked(Chain().slice([1], [5], [1]).slice([1], [3], [-2])) == ["Slice", "Slice"]


def test_a_slice_that_others_read_stays() -> None:
    assert checked(Chain().slice([1], [3], [0]).read().slice([2], [5], [1])) == ["Slice", "Slice"]


axis = st.integers(-3, 2)
bound = st.integers(-8, 8)
step = st.sampled_from([-2, -1, 1, 2])


@quickly
@given(st.lists(st.tuples(axis, bound, bound, step), min_size=1, max_size=4))
def test_any_chain_of_slices_keeps_its_numbers(slices: list[tuple[int, int, int, int]]) -> None:
    chain = Chain()
    for where, start, end, stride in slices:
        chain.add("Slice", [start], [end], [where], [stride])

    assert len(checked(chain)) <= len(slices)


def test_reshapes_become_one() -> None:
    assert checked(Chain().add("Reshape", [24, 5]).add("Reshape", [2, 60])) == ["Reshape"]
    assert checked(Chain().add("Reshape", [24, 5]).add("Reshape", [-1, 6])) == ["Reshape"]
    assert checked(Chain().add("Reshape", [0, -1]).add("Reshape", [8, -1]).add("Reshape", [120])) == [
        "Reshape"
    ]


def test_a_reshape_that_copies_a_size_of_the_one_before_stays() -> None:
    assert checked(Chain().add("Reshape", [24, 5]).add("Reshape", [0, 5, 1])) == ["Reshape", "Reshape"]


def test_a_reshape_that_others_read_stays_for_them() -> None:
    assert checked(Chain().add("Reshape", [24, 5]).read().add("Reshape", [2, 60])) == ["Reshape", "Reshape"]


shapes = st.sampled_from(
    [[120], [-1], [24, 5], [0, -1], [0, 0, 5], [5, 4, 6], [2, 2, 30], [-1, 3], [1, 120], [0, 2, -1]]
)


@quickly
@given(st.lists(shapes, min_size=1, max_size=4))
def test_any_chain_of_reshapes_keeps_its_numbers(chain: list[list[int]]) -> None:
    made, shape = Chain(), SHAPE
    for sizes in chain:
        filled = [shape[i] if size == 0 and i < len(shape) else size for i, size in enumerate(sizes)]
        try:
            shape = np.empty(shape).reshape(filled).shape
        except ValueError:  # this shape does not fit the one before
            continue
        made.add("Reshape", sizes)
    if made.nodes:
        checked(made)


def waiting(*behind: tuple[str, Sequence[int]]) -> onnx.ModelProto:
    """A Reshape whose shape is known only once the sum of x is, and views behind it."""
    chain = Chain()
    constants = {"sizes": [24, 5], "zero": [0], "one": [1]}
    chain.constants = [numpy_helper.from_array(np.array(v, np.int64), k) for k, v in constants.items()]
    chain.nodes = [
        helper.make_node("ReduceSum", ["x"], ["sum"], keepdims=0),
        helper.make_node("IsNaN", ["sum"], ["nan"]),
        helper.make_node("Cast", ["nan"], ["number"], to=TensorProto.INT64),
        helper.make_node("Mul", ["number", "zero"], ["nothing"]),
        helper.make_node("Add", ["sizes", "nothing"], ["shape"]),
        helper.make_node("Reshape", ["x", "shape"], ["late"]),
    ]
    chain.last = "late"
    for op, numbers in behind:
        chain.add(op, numbers)
    chain.add("Flatten")
    model = chain.model()
    shape = helper.make_tensor_value_info("late", TensorProto.FLOAT, [24, 5])
    late = [value for value in model.graph.value_info if value.name != "late"]
    del model.graph.value_info[:]
    model.graph.value_info.extend([*late, shape])
    return onnx.shape_inference.infer_shapes(model)


@pytest.mark.parametrize(
    "behind",
    [
        [],
        [("Reshape", [4, 30])],
        [("Unsqueeze", [0])],
        [("Unsqueeze", [1]), ("Squeeze", [1])],
        [("Reshape", [2, -1]), ("Unsqueeze", [2]), ("Reshape", [60, 2])],
        [("Reshape", [0, 1, 5])],
    ],
)
def test_views_behind_a_wait_become_part_of_it(behind: list[tuple[str, list[int]]]) -> None:
    model = waiting(*behind)

    found = merged(model)

    for before, after in zip(run(model), run(found), strict=True):
        np.testing.assert_array_equal(after, before)
    assert ops(found) == ["ReduceSum", "IsNaN", "Cast", "Mul", "Add", "Reshape", "Flatten"]


def test_only_the_rank_of_what_waits_is_told() -> None:
    found = merged(waiting(("Reshape", [4, 30])))
    (late,) = (node.output[0] for node in found.graph.node if node.op_type == "Reshape")
    (value,) = (value for value in found.graph.value_info if value.name == late)

    dims = value.type.tensor_type.shape.dim
    assert len(dims) == 2 and not any(dim.HasField("dim_value") for dim in dims)


def test_a_type_that_is_taken_from_a_value_is_said() -> None:
    made = Chain().add("CastLike", [2, 3]).model()
    made.graph.node[0].input[:] = ["c0", "x"]
    model = ir.from_proto(onnx.shape_inference.infer_shapes(made))
    CastsByType()(model)

    (node,) = ir.to_proto(model).graph.node
    assert (node.op_type, list(node.input)) == ("Cast", ["c0"])
    (result,) = run(ir.to_proto(model))
    assert result.dtype == np.float32 and result.tolist() == [2, 3]


# -- sums over leading axes are products with ones ---------------------------------------------------------


def model(
    shape: tuple[int, ...], axes: list[int], keepdims: int, kind: int = TensorProto.FLOAT
) -> onnx.ModelProto:
    """``y = ReduceSum(x, axes)``."""
    summed = {axis % len(shape) for axis in axes}
    left = [1 if at in summed else size for at, size in enumerate(shape) if keepdims or at not in summed]
    graph = helper.make_graph(
        [helper.make_node("ReduceSum", ["x", "axes"], ["y"], keepdims=keepdims)],
        "g",
        [helper.make_tensor_value_info("x", kind, shape)],
        [helper.make_tensor_value_info("y", kind, left)],
        [numpy_helper.from_array(np.array(axes, np.int64), "axes")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def rewritten(proto: onnx.ModelProto) -> onnx.ModelProto:
    made = ir.from_proto(proto)
    SumsToProducts()(made)
    return ir.to_proto(made)


@given(st.lists(st.sampled_from([1, 2, 7]), max_size=2), st.data())
def test_it_is_the_same_sum(ahead: list[int], data: st.DataObject) -> None:
    shape = (*ahead, 16, *data.draw(st.sampled_from([(64,), (8, 8), (4, 1, 16)])))
    axes = data.draw(st.permutations(range(len(ahead) + 1)))
    signed = [axis - len(shape) if data.draw(st.booleans()) else axis for axis in axes]
    own = model(shape, signed, data.draw(st.integers(0, 1)))
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)

    other = rewritten(own)

    assert "MatMul" in {node.op_type for node in other.graph.node}
    expected, found = run(own, x)[0], run(other, x)[0]
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("shape", "axes", "ops"),
    [
        ((32, 64), [0], {"MatMul", "Expand", "Reshape"}),
        ((8, 4, 64), [1, 0], {"MatMul", "Expand", "Reshape"}),
        ((32, 4, 64), [1], {"ReduceSum"}),
        ((32, 64), [1], {"ReduceSum"}),
        ((32, 64), [0, 1], {"ReduceSum"}),
        ((4, 64), [0], {"ReduceSum"}),  # few numbers
        ((1 << 17, 2), [0], {"ReduceSum"}),  # as many ones again
        ((4096, 1152), [0], {"ReduceSum"}),  # more than a cache holds
        ((256, 1 << 14), [0], {"MatMul", "Expand", "Reshape"}),  # which few rows may
    ],
)
def test_only_some_leading_axes_are(shape: tuple[int, ...], axes: list[int], ops: set[str]) -> None:
    made = rewritten(model(shape, axes, 0)).graph.node

    assert {node.op_type for node in made} - {"Constant"} == ops


def test_whole_numbers_are_left_alone() -> None:
    made = rewritten(model((32, 64), [0], 0, TensorProto.INT64)).graph.node

    assert [node.op_type for node in made] == ["ReduceSum"]


# -- products between which only ops by entry stand compute on the blocked layout what they did ------------


ROWS, WIDTH, INNER = 64, 128, 1024
"""With 4 samples, 2^25 multiplications a product."""


class Layers(nn.Module):
    """Linear layers between which ``between`` stands, and a head that reads their rows' mean."""

    def __init__(self, between: Callable[[Tensor], Tensor], *sizes: int, bias: bool = True) -> None:
        super().__init__()
        pairs = itertools.pairwise(sizes)
        self.layers = nn.ModuleList(nn.Linear(*pair, bias=bias) for pair in pairs)
        self.head, self.between = nn.Linear(sizes[-1], 3), between

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = self.between(layer(x))
        return self.head(self.layers[-1](x).mean(1))  # type: ignore[no-any-return]


def products(model: bytes) -> int:
    """Convolutions of one position, and of one group."""
    nodes = onnx.load_from_string(model).graph.node
    return Counter((node.op_type, node.domain) for node in nodes)["Conv", LAYOUT]


INSIDE: dict[str, tuple[nn.Module, int]] = {
    "gelu": (Layers(nn.GELU(), WIDTH, INNER, WIDTH), 5),
    "relu": (Layers(nn.ReLU(), WIDTH, INNER, WIDTH), 5),
    "no bias": (Layers(nn.Tanh(), WIDTH, INNER, WIDTH, bias=False), 5),
    "by hand": (Layers(lambda x: x * (0.5 * x).sigmoid() + 1.0, WIDTH, INNER, WIDTH), 5),
    "leaky": (Layers(nn.LeakyReLU(), WIDTH, INNER, WIDTH), 5),
    "three layers": (Layers(nn.ReLU(), WIDTH, INNER, INNER, WIDTH), 8),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", INSIDE)
def test_a_step_is_the_same_step(name: str) -> None:
    """The gradient of what goes in is read by nothing, so that a layer has two products or three."""
    module, count = INSIDE[name]
    function = step_of(module, (ROWS, WIDTH))
    own = to_onnx(OnnxTarget().capture(function))

    other = write_blocked(own, room=math.inf)

    assert other is not None and (products(own), products(other)) == (0, count)
    assert verify(function, other, 1).worst < 1e-5
    assert write_blocked(own, room=math.inf) == other  # equal bytes each time


OUTSIDE: dict[str, nn.Module] = {
    "its own sum": Layers(
        lambda x: x.relu() + x.detach().sum((0, 1), dtype=torch.float64).float().sum(), WIDTH, INNER, WIDTH
    ),
    "a count of rows": Layers(lambda x: x.relu() + (x > 0).sum((0, 1)).sum(), WIDTH, INNER, WIDTH),
    "columns": Layers(lambda x: x.softmax(-1), WIDTH, INNER, WIDTH),
    "a sum of columns": Layers(lambda x: x * x.mean(-1, keepdim=True), WIDTH, INNER, WIDTH),
    "a number for each column": Layers(lambda x: x * x[:1, :1], WIDTH, INNER, WIDTH),
    "parts": Layers(lambda x: x.relu().unflatten(-1, (2, -1)).mT.flatten(-2), WIDTH, INNER, WIDTH),
    "odd columns": Layers(nn.ReLU(), WIDTH, INNER + 8, WIDTH),
    "few": Layers(nn.ReLU(), WIDTH, INNER // 2, WIDTH),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", OUTSIDE)
def test_what_needs_its_numbers_in_order_is_left(name: str) -> None:
    own = to_onnx(OnnxTarget().capture(step_of(OUTSIDE[name], (ROWS, WIDTH))))

    assert write_blocked(own, room=math.inf) is None


def iterated(t: Tensors) -> Tensors:
    """Newton and Schulz's iteration: a product is a factor of another, twice."""
    x = t["weights.w"]
    for _ in range(2):
        square = x @ x.T
        x = 3.4 * x + (2.0 * (square @ square) - 4.8 * square) @ x
    return {"metric.x": x}


def turned_out(t: Tensors) -> Tensors:
    """What two products read is given out with rows and columns exchanged."""
    hidden = (t["batch.x"] @ t["weights.a"].T).relu()
    return {
        "metric.y": hidden @ t["weights.b"].T,
        "metric.z": hidden @ t["weights.c"].T,
        "metric.turned": hidden.T.clone(),
    }


FACTORS: dict[str, tuple[Callable[[Tensors], Tensors], dict[str, tuple[int, ...]]]] = {
    "twice in a product": (iterated, {"weights__w": (512, 512)}),
    "given out": (
        turned_out,
        {
            "batch__x": (512, 128),
            "weights__a": (1024, 128),
            "weights__b": (128, 1024),
            "weights__c": (128, 1024),
        },
    ),
}


@pytest.mark.parametrize("name", FACTORS)
def test_what_is_read_in_its_order_too_is_left(name: str) -> None:
    fn, shapes = FACTORS[name]
    function = pointwise(fn, **shapes)
    own = to_onnx(OnnxTarget().capture(function))

    other = write_blocked(own, room=math.inf) or own

    assert verify(function, other, 1).worst < 1e-4


def test_products_give_way_to_memory() -> None:
    """Ways into the layout need some beside what is there."""
    module = Layers(nn.Tanh(), *[INNER // 2] * 5)
    own = to_onnx(OnnxTarget().capture(step_of(module, (2 * ROWS, INNER // 2))))

    assert write_blocked(own) is not None and write_blocked(own, room=0.5) is None


# -- forms that onnxruntime does not take entry by entry ---------------------------------------------------


SHAPES = st.lists(st.sampled_from([1, 1, 3, 40]), min_size=1, max_size=5).map(tuple)


def example(
    op: str, shape: tuple[int, ...], one: tuple[int, ...], constant: bool, first: bool
) -> onnx.ModelProto:
    """``y = op(x, c)`` or ``op(c, x)``: c has a single entry."""
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)]
    constants = [numpy_helper.from_array(np.full(one, 1.7, np.float32), "c")]
    if not constant:
        inputs.append(helper.make_tensor_value_info("c", TensorProto.FLOAT, one))
    node = helper.make_node(op, ["c", "x"] if first else ["x", "c"], ["y"])
    kind = TensorProto.BOOL if op in ("Greater", "LessOrEqual") else TensorProto.FLOAT
    sizes = np.broadcast_shapes(shape, one)
    graph = helper.make_graph(
        [node], "g", inputs, [helper.make_tensor_value_info("y", kind, sizes)], constants if constant else []
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def single_operands(model: onnx.ModelProto) -> list[tuple[int, ...]]:
    """Shapes of operands with one entry, of the nodes that compute with floats."""
    inferred = onnx.shape_inference.infer_shapes(model)
    shapes = {
        value.name: tuple(size.dim_value for size in value.type.tensor_type.shape.dim)
        for value in (*inferred.graph.input, *inferred.graph.value_info)
    } | {each.name: tuple(each.dims) for each in inferred.graph.initializer}
    nodes = [
        node
        for node in inferred.graph.node
        if node.op_type in ("Add", "Mul", "Sub", "Greater", "LessOrEqual")
    ]
    return [shapes[name] for node in nodes for name in node.input if math.prod(shapes.get(name, (0,))) == 1]


@given(
    st.sampled_from(["Add", "Sub", "Mul", "Greater", "LessOrEqual"]),
    SHAPES,
    st.sampled_from([(), (1,), (1, 1)]),
    st.booleans(),
    st.booleans(),
)
def test_a_single_entry_gets_the_result_s_rank_and_computes_the_same(
    op: str, shape: tuple[int, ...], one: tuple[int, ...], constant: bool, first: bool
) -> None:
    model = example(op, shape, one, constant, first)
    found = ir.from_proto(model)
    MatchRanks()(found)
    rewritten = ir.to_proto(found)
    onnx.checker.check_model(rewritten, full_check=True)
    x = np.random.default_rng(0).standard_normal(shape, np.float32)
    arrays = {"x": x, "c": np.full(one, 1.7, np.float32)}
    [mine], [theirs] = (run_onnx(each.SerializeToString(), arrays) for each in (rewritten, model))
    np.testing.assert_array_equal(mine, theirs)
    sizes = np.broadcast_shapes(shape, one)
    if 1 in sizes and math.prod(sizes) >= 256:
        assert single_operands(rewritten) == [(1,) * len(sizes)]
    else:
        assert ir.to_proto(found).graph.node == model.graph.node


def test_a_pointwise_weight_s_update_scales_by_numbers_of_its_rank() -> None:
    def update(tensors: Tensors) -> Tensors:
        w, g = tensors["state.w"], tensors["batch.0.x"]
        return {"state.w": w - tensors["hyper.lr"] * (g + 0.1 * w)}

    function = pointwise(update, state__w=(40, 20, 1, 1), batch__0__x=(40, 20, 1, 1), hyper__lr=())
    proto = onnx.load_from_string(to_onnx(capture(function)))
    assert single_operands(proto) == [(1, 1, 1, 1)] * 2


@pytest.mark.parametrize("index", [0, 1, -1])
def test_an_entry_of_a_short_last_axis_is_split_off(index: int) -> None:
    def chosen(tensors: Tensors) -> Tensors:
        return {
            "record.y": tensors["batch.0.x"].select(-1, index) * 2.0,
            "record.z": tensors["batch.0.x"].select(1, 2),
        }

    function = pointwise(chosen, batch__0__x=(3, 5, 2))
    proto = onnx.load_from_string(to_onnx(capture(function)))
    assert [n.op_type for n in proto.graph.node if n.op_type in ("Split", "Gather")] == ["Split", "Gather"]
    x = torch.randn(3, 5, 2)
    y, z = run_onnx(proto.SerializeToString(), {"batch.0.x": x})
    np.testing.assert_array_equal(y, x[..., index].numpy() * 2)
    np.testing.assert_array_equal(z, x[:, 2].numpy())
