"""Operands of one entry beside a tensor that has axes of one entry, such as the weight of a pointwise convolution.

ONNX Runtime walks two operands from their last axes. Where the last axes are of one entry in both, the next ones differ, and
it calls its kernel for every single entry: 4.0 ms to scale 1280x320x1x1 by a number, 0.03 by the same number as 1x1x1x1.
"""

from __future__ import annotations

import math

import onnx_ir as ir

from edgefl_export.onnx.nodes import static_sizes, whole_numbers

_BINARY = frozenset(
    {"Add", "Div", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Mul", "Pow", "Sub"}
)
_FEW = 256
"""Entries below which a node more costs more than it spares."""


def match_ranks(graph: ir.Graph) -> None:
    """Where one operand has a single entry and the result axes of one entry, that operand gets the result's rank."""
    for node in list(graph):
        sizes = static_sizes(node.outputs[0]) if node.op_type in _BINARY else None
        if sizes is None or 1 not in sizes or math.prod(sizes) < _FEW:
            continue
        ones = [1] * len(sizes)
        for index, value in enumerate(node.inputs):
            found = static_sizes(value) if value is not None else None
            if value is not None and found is not None and math.prod(found) == 1 and found != ones:
                node.replace_input_with(index, _reshaped(graph, node, value, ones))


def _reshaped(graph: ir.Graph, reader: ir.Node, value: ir.Value, sizes: list[int]) -> ir.Value:
    if value.const_value is not None:
        tensor = ir.tensor(value.const_value.numpy().reshape(sizes))
        made = ir.node("Constant", [], {"value": tensor})
        made.outputs[0].const_value = tensor
        graph.insert_before(reader, made)
    else:
        shape = whole_numbers(sizes)
        made = ir.node("Reshape", [value, shape.outputs[0]])
        graph.insert_before(reader, [shape, made])
    result = made.outputs[0]
    result.type, result.shape = value.type, ir.Shape(sizes)
    return result
