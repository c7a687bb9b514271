"""Small clean-ups of an ONNX graph that a lowering node by node leaves behind: chains that one node can say."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from edgefl_export.onnx.nodes import integers, made_by, static_sizes, whole_numbers

_SLICE_INPUTS = 5
_VIEWS = frozenset({"Reshape", "Squeeze", "Unsqueeze"})


def merge_chains(graph: ir.Graph) -> None:
    """Slice of a Slice along other axes becomes one Slice, Reshape of a Reshape one Reshape, and so with Transpose: fewer
    copies and nodes.

    A Reshape that waits for another value (see :mod:`edgefl_export.ordering`) goes on waiting: views behind it become
    part of it.
    """
    for node in list(graph):
        if node.op_type == "Slice":
            _merge_slices(graph, node)
        elif node.op_type == "Transpose":
            _merge_transposes(node)
        elif node.op_type in _VIEWS and not _join_waiting(graph, node) and node.op_type == "Reshape":
            _merge_reshapes(node)
    for node in graph:
        if _delay(node) is not None:
            _hide_shape(node.outputs[0])


def name_types(graph: ir.Graph) -> None:
    """CastLike becomes the Cast that it stands for: ONNX Runtime has no kernel for it, and warns of each while it loads."""
    for node in graph:
        like = node.inputs[1].dtype if node.op_type == "CastLike" and node.inputs[1] is not None else None
        if like is not None:
            node.op_type = "Cast"
            node.attributes["to"] = ir.AttrInt64("to", int(like))
            node.resize_inputs(1)


def _merge_slices(graph: ir.Graph, node: ir.Node) -> None:
    before = made_by(node.inputs[0], "Slice")
    if before is None or _read_elsewhere(before, node):
        return
    first, second = _slice_arguments(before), _slice_arguments(node)
    if first is None or second is None or set(first[2]) & set(second[2]):
        return
    joined = [_constant(graph, node, [*a, *b]) for a, b in zip(first, second, strict=True)]
    node.replace_input_with(0, before.inputs[0])
    for index, value in enumerate(joined, start=1):
        node.replace_input_with(index, value)


def _merge_transposes(node: ir.Node) -> None:
    """Two that undo each other become none."""
    before = made_by(node.inputs[0], "Transpose")
    source = before.inputs[0] if before is not None else None
    if before is None or source is None:
        return
    first, second = (list(each.attributes["perm"].as_ints()) for each in (before, node))
    joined = [first[axis] for axis in second]
    node.replace_input_with(0, source)
    node.attributes["perm"] = ir.AttrInt64s("perm", joined)
    if joined == sorted(joined) and not node.outputs[0].is_graph_output():
        node.outputs[0].replace_all_uses_with(source)


def _merge_reshapes(node: ir.Node) -> None:
    """Allowed where the outer shape says everything itself: no 0, which copies a size of the inner result."""
    before, shape = made_by(node.inputs[0], "Reshape"), integers(node.inputs[1])
    if before is None or shape is None or 0 in shape:
        return
    if integers(before.inputs[1]) is not None:
        node.replace_input_with(0, before.inputs[0])


def _join_waiting(graph: ir.Graph, node: ir.Node) -> bool:
    """A view of a Reshape that waits becomes a Reshape that waits. Left behind it, runtimes would fuse the two."""
    before, result = made_by(node.inputs[0], "Reshape"), node.outputs[0]
    delay, sizes = _delay(before), static_sizes(result)
    # A Reshape would copy a size of its input for 0.
    if before is None or delay is None or sizes is None or 0 in sizes:
        return False
    shape = ir.node("Add", [_constant(graph, node, sizes), delay])
    view = ir.node("Reshape", [before.inputs[0], shape.outputs[0]])
    view.outputs[0].type, view.outputs[0].shape = result.type, result.shape
    graph.insert_before(node, [shape, view])
    result.replace_all_uses_with(view.outputs[0], replace_graph_outputs=True)
    graph.remove(node, safe=True)
    return True


def _delay(node: ir.Node | None) -> ir.Value | None:
    """Of a Reshape whose shape is constant sizes plus a computed value: that value."""
    add = made_by(node.inputs[1], "Add") if node is not None and node.op_type == "Reshape" else None
    if add is None or integers(add.inputs[0]) is None:
        return None
    return add.inputs[1] if integers(add.inputs[1]) is None else None


def _hide_shape(value: ir.Value) -> None:
    """Leave only the rank: onnxruntime fuses Reshapes of known result, and would not wait then."""
    if value.shape is not None and not value.is_graph_output():
        value.shape = ir.Shape([None] * len(value.shape))


def _read_elsewhere(node: ir.Node, reader: ir.Node) -> bool:
    value = node.outputs[0]
    return value.is_graph_output() or any(user is not reader for user in value.consumers())


def _slice_arguments(node: ir.Node) -> tuple[list[int], ...] | None:
    """Starts, ends, axes (not negative) and steps, if all are given as constants."""
    lists = [integers(value) for value in node.inputs[1:]]
    rank = (
        len(node.inputs[0].shape) if node.inputs[0] is not None and node.inputs[0].shape is not None else None
    )
    if len(node.inputs) != _SLICE_INPUTS or rank is None or any(item is None for item in lists):
        return None
    starts, ends, axes, steps = (list(item or ()) for item in lists)
    return starts, ends, [axis % rank for axis in axes], steps


def _constant(graph: ir.Graph, before: ir.Node, numbers: list[int]) -> ir.Value:
    node = whole_numbers(numbers)
    graph.insert_before(before, node)
    node.outputs[0].const_value = ir.tensor(np.array(numbers, np.int64))
    return node.outputs[0]
