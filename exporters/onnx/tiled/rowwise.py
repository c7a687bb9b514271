"""Which ops make every row, a place of the first axis, of the same rows of what they read."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from onnx import NodeProto

from exporters.onnx.values import BY_ENTRY, LAYOUT, Values, attributes

Rule = Callable[[Values, NodeProto], tuple[str, ...]]


def rows_read(values: Values, node: NodeProto) -> tuple[str, ...]:
    """The inputs of which ``node`` reads a row for a row of its result; none where it is another kind of op, or sizes are
    unknown. What else it reads is the same for all rows."""
    if len(node.output) != 1 or node.output[0] not in values.shapes:
        return ()
    rule = _RULES.get((node.domain, node.op_type))
    read = rule(values, node) if rule else ()
    known = all(name in values.shapes and values.types.get(name, 0) for name in (*read, *node.output))
    return read if known else ()


def _entries(values: Values, node: NodeProto) -> tuple[str, ...]:
    shape = values.shapes[node.output[0]]
    names = [name for name in node.input if name]
    if any(name not in values.shapes for name in names):
        return ()
    shapes = [(name, values.shapes[name]) for name in names]
    return tuple(name for name, each in shapes if len(each) == len(shape) and each[:1] == shape[:1] != (1,))


def _along_axis(values: Values, node: NodeProto) -> tuple[str, ...]:
    axis = int(attributes(node).get("axis", -1))
    return (node.input[0],) if axis % len(values.shapes[node.output[0]]) else ()


def _reduced(values: Values, node: NodeProto) -> tuple[str, ...]:
    axes = values.whole(node.input[1]) if len(node.input) > 1 else None
    rank = len(values.shapes[node.output[0]])
    kept = attributes(node).get("keepdims", 1)
    return (node.input[0],) if kept and axes and all(axis % rank for axis in axes) else ()


def _view(values: Values, node: NodeProto) -> tuple[str, ...]:
    """Equally many first rows of both shapes hold the same numbers."""
    return () if values.whole(node.input[1]) is None else (node.input[0],)


def _pooled(values: Values, node: NodeProto) -> tuple[str, ...]:
    return (node.input[0],)


def _scaled(values: Values, node: NodeProto) -> tuple[str, ...]:
    """A number, and perhaps another that is added, for each channel."""
    kernel = values.shapes.get(node.input[1], (0, 0))
    return (node.input[0],) if math.prod(kernel[1:]) == 1 else ()


_RULES: Mapping[tuple[str, str], Rule] = {
    **{("", op): _entries for op in BY_ENTRY},
    **{("", op): _along_axis for op in ("Softmax", "LogSoftmax")},
    **{("", op): _reduced for op in ("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin")},
    ("", "Reshape"): _view,
    (LAYOUT, "GlobalAveragePool"): _pooled,
    (LAYOUT, "Conv"): _scaled,
}
