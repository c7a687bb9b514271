"""Chains that one node can say: fewer nodes, the same numbers, and no wait lost."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from onnx_ir.passes.common import RemoveUnusedNodesPass

from edgefl_export.onnx.passes import CastsByType, MergeChains

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


def run(model: onnx.ModelProto) -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return list(session.run(None, {"x": X}))


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
    (result,) = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString()).run(None, {"x": X})
    assert result.dtype == np.float32 and result.tolist() == [2, 3]
