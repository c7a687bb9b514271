"""ONNX Scan from a step written as a plain function: the one place that builds a graph within a graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir
from onnxscript import evaluator

Value = Any  # a tensor of the graph under construction
Step = Callable[[Sequence[Value], Sequence[Value]], tuple[Sequence[Value], Sequence[Value]]]


def scan(step: Step, state: Sequence[Value], sequences: Sequence[Value], *, reverse: bool) -> list[Value]:
    """Run ``step`` over the first axis of ``sequences``, from its end if ``reverse``.

    ``step(state, slices) -> (state, rows)`` is called once, to record its operators; other values that it uses are
    read from the graph around it. Returns the last state, then the rows of all steps, in order of position. A value
    may be returned once: what is both state and row needs two nodes.
    """
    outer: Any = evaluator.default()
    state_in = [_inner(value, f"state{k}", value.shape) for k, value in enumerate(state)]
    slices = [_inner(value, f"slice{k}", value.shape[1:]) for k, value in enumerate(sequences)]
    inner = type(outer)(outer.opset, {})
    with evaluator.default_as(inner):
        state_out, rows = step(state_in, slices)
    outputs = [*state_out, *rows]
    _name(inner.nodes)
    for value in outputs:
        value.type = state_in[0].type
    body = ir.Graph([*state_in, *slices], outputs, nodes=inner.nodes, name="step", opset_imports={"": 18})
    direction = int(reverse)
    node = ir.Node(
        "",
        "Scan",
        [*state, *sequences],
        [
            ir.AttrGraph("body", body),
            ir.AttrInt64("num_scan_inputs", len(sequences)),
            ir.AttrInt64s("scan_input_directions", [direction] * len(sequences)),
            ir.AttrInt64s("scan_output_directions", [direction] * len(rows)),
        ],
        num_outputs=len(outputs),
    )
    outer.nodes.append(node)
    return list(node.outputs)


def _inner(outside: Value, name: str, shape: Sequence[int]) -> ir.Value:
    return ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(outside.dtype))


def _name(nodes: Sequence[ir.Node]) -> None:
    for index, node in enumerate(nodes):
        node.name = f"{node.op_type}_{index}"
        for k, value in enumerate(node.outputs):
            value.name = f"step{index}_{k}"
