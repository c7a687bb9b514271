"""Merge of equal nodes, as onnxruntime does it when it loads a graph."""

from __future__ import annotations

from collections import Counter

import torch
from torch import fx

from edgefl.contract.algorithm import Function
from edgefl.contract.tensors import Tensors, TensorSpec
from edgefl_export.capture.rewrites import merge_equal
from edgefl_export.onnx.target import OnnxTarget

_aten = torch.ops.aten


def test_a_value_that_is_computed_twice_is_computed_once() -> None:
    def fn(tensors: Tensors) -> Tensors:
        w, x = tensors["state.w"], tensors["batch.0.x"]
        loss = (torch.where(w.abs() > 0.5, w, 0.0) * x).sum()
        return {"metric.loss": loss, "state.w": w - loss * w.abs()}

    wide = TensorSpec((8, 8))
    found = OnnxTarget().capture(Function("f", fn, {"state.w": wide, "batch.0.x": wide}))

    assert Counter(node.target for node in found.module.graph.nodes)[_aten.abs.default] == 1


def test_calls_that_differ_stay() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    calls = [
        *(graph.call_function(_aten.add.Scalar, (x, value)) for value in (0.0, -0.0, 1, 1.0, True)),
        *(graph.call_function(_aten.rand.default, ([2],)) for _ in range(2)),
        *(graph.call_function(_aten.add_.Scalar, (x, 1)) for _ in range(2)),
    ]
    graph.output(tuple(calls))

    merge_equal(fx.GraphModule({}, graph))

    assert [node for node in graph.nodes if node.op == "call_function"] == calls


def test_what_is_equal_behind_equal_nodes_is_merged_too() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    first, second = (graph.call_function(_aten.abs.default, (x,)) for _ in range(2))
    sums = [graph.call_function(_aten.sum.dim_IntList, (each, [0, 1])) for each in (first, second)]
    graph.output(tuple(sums))

    merge_equal(fx.GraphModule({}, graph))

    assert [node.target for node in graph.nodes][1:-1] == [_aten.abs.default, _aten.sum.dim_IntList]
