"""Forms that onnxruntime does not take entry by entry: the same numbers, and no slow one left."""

from __future__ import annotations

import math

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from edgefl.contract.tensors import Tensors
from edgefl_export.capture.trace import capture
from edgefl_export.onnx.model import to_onnx
from edgefl_export.onnx.passes import MatchRanks
from tests.exporters.examples import pointwise

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


def run(model: onnx.ModelProto, arrays: dict[str, np.ndarray]) -> np.ndarray:
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    [found] = session.run(None, {each.name: arrays[each.name] for each in session.get_inputs()})
    return found


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
    np.testing.assert_array_equal(run(rewritten, arrays), run(model, arrays))
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
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    y, z = session.run(None, {"batch.0.x": x.numpy()})
    np.testing.assert_array_equal(y, x[..., index].numpy() * 2)
    np.testing.assert_array_equal(z, x[:, 2].numpy())
