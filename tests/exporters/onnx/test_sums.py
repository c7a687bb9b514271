"""Sums over leading axes are products with ones: the same numbers, and as many axes as before."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from edgefl_export.onnx.passes import SumsToProducts


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


def run(proto: onnx.ModelProto, x: Any) -> Any:
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {"x": x})[0]


@given(st.lists(st.sampled_from([1, 2, 7]), max_size=2), st.data())
def test_it_is_the_same_sum(ahead: list[int], data: st.DataObject) -> None:
    shape = (*ahead, 16, *data.draw(st.sampled_from([(64,), (8, 8), (4, 1, 16)])))
    axes = data.draw(st.permutations(range(len(ahead) + 1)))
    signed = [axis - len(shape) if data.draw(st.booleans()) else axis for axis in axes]
    own = model(shape, signed, data.draw(st.integers(0, 1)))
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)

    other = rewritten(own)

    assert "MatMul" in {node.op_type for node in other.graph.node}
    expected, found = run(own, x), run(other, x)
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
