"""Passes over a translated ONNX graph: rewrites of what torch.onnx leaves node by node, and the clean-up.

Each rewrite is a class with its equation in the docstring. :data:`PASSES` lists all of them in the order in which they run.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
from onnx_ir import convenience
from onnx_ir.passes import InPlacePass, PassResult, common

# Entries below which one more node costs more than it saves.
_FEW_BROADCAST, _FEW_SUMMED = 256, 1024
# Limits of sums as products: the ones take memory for each row. Beyond a few rows, more numbers than a cache holds are
# summed as fast, because the product reads a few columns of all rows at a time (4096x1152: 0.63 ms and 0.90).
_ROWS, _FEW_ROWS, _MANY = 1 << 16, 256, 1 << 19
_SUM_INPUTS, _SLICE_INPUTS = 2, 5
_VIEWS = frozenset({"Reshape", "Squeeze", "Unsqueeze"})
_BINARY = frozenset(
    {"Add", "Div", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Mul", "Pow", "Sub"}
)


class GraphRewrite(InPlacePass):
    """Base class of passes that rewrite the nodes of a graph."""

    def call(self, model: ir.Model) -> PassResult:
        """Rewrite the graph of ``model``."""
        self.rewrite(model.graph)
        return PassResult(model, modified=True)

    @abstractmethod
    def rewrite(self, graph: ir.Graph) -> None:
        """Rewrite ``graph`` in place."""


class SumsToProducts(GraphRewrite):
    """Pass: a ReduceSum over leading axes becomes a product with ones: sum_r x[r, c] -> (1 ... 1) x.

    ONNX Runtime adds the rows one after the other for a few columns at a time, and on several threads for fewer. The
    sum of 32 rows of 51,200 numbers takes it 0.26 ms, and 2.05 on two threads; the product 0.12 and 0.10 (AMD EPYC,
    medians).
    """

    def rewrite(self, graph: ir.Graph) -> None:
        for node in list(graph):
            x, rank = node.inputs[0] if node.inputs else None, _leading(node)
            if x is None or not rank:
                continue
            sizes = static_sizes(x) or []
            rows, columns = math.prod(sizes[:rank]), math.prod(sizes[rank:])
            fits = rows <= _FEW_ROWS or (rows <= _ROWS and rows * columns <= _MANY)
            if not (rows > 1 and fits and columns > 1 and rows * columns >= _FEW_SUMMED):
                continue
            made = _product(x, rows, columns, static_sizes(node.outputs[0]) or [])
            made[-1].outputs[0].type, made[-1].outputs[0].shape = node.outputs[0].type, node.outputs[0].shape
            convenience.replace_nodes_and_values(graph, node, [node], made, node.outputs, made[-1].outputs)


class MergeChains(GraphRewrite):
    """Pass: a Slice of a Slice along other axes becomes one Slice, and so do Reshape and Transpose.

    A Reshape that delays a value (:mod:`edgefl_export.operators`) keeps delaying it: later views become part of it.
    """

    def rewrite(self, graph: ir.Graph) -> None:
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


class MatchRanks(GraphRewrite):
    """Pass: op(x, c) with a single-entry c -> op(x, c as 1x...x1), if the result has axes of one entry.

    ONNX Runtime walks two operands from their last axes. If the last axes have one entry in both, the next ones differ, and
    it calls its kernel for every single entry: 4.0 ms to scale 1280x320x1x1 by a number, 0.03 by the same number as 1x1x1x1.
    """

    def rewrite(self, graph: ir.Graph) -> None:
        for node in list(graph):
            sizes = static_sizes(node.outputs[0]) if node.op_type in _BINARY else None
            if sizes is None or 1 not in sizes or math.prod(sizes) < _FEW_BROADCAST:
                continue
            ones = [1] * len(sizes)
            for index, value in enumerate(node.inputs):
                found = static_sizes(value) if value is not None else None
                if value is not None and found is not None and math.prod(found) == 1 and found != ones:
                    node.replace_input_with(index, _reshape(graph, node, value, ones))


class CastsByType(GraphRewrite):
    """Pass: CastLike(x, y) -> Cast(x, to the type of y). ONNX Runtime has no kernel for CastLike and warns about it."""

    def rewrite(self, graph: ir.Graph) -> None:
        for node in graph:
            like = node.inputs[1].dtype if node.op_type == "CastLike" and node.inputs[1] is not None else None
            if like is not None:
                node.op_type = "Cast"
                node.attributes["to"] = ir.AttrInt64("to", int(like))
                node.resize_inputs(1)


class LabelGradients(GraphRewrite):
    """Pass that shortens the gradient of log-softmax at one class for each row, the end of cross entropy's backward pass.

    As derived, the gradient g of the label's entry is laid out among zeros, summed again, and the share of softmax is
    subtracted, each through all classes::

        s = ScatterElements(0, label, g);  s - p * ReduceSum(s)   ->   ScatterElements(p * -g, label, g, reduction=add)

    The numbers are the same: a sum with zeros is g, and -a + g is g - a.
    """

    def rewrite(self, graph: ir.Graph) -> None:
        for node in list(graph):
            left, right = node.inputs if node.op_type == "Sub" else (None, None)
            scatter, product = made_by(left, "ScatterElements"), made_by(right, "Mul")
            if scatter is None or product is None or not _is_laid_out(scatter):
                continue
            total = next((value for value in product.inputs if _sums(value, scatter)), None)
            if total is None or not (_is_read(scatter.outputs[0], 2) and _is_read(total, 1)):
                continue
            shares = product.inputs[1 - product.inputs.index(total)]
            _replace_labels(graph, node, scatter, shares)


PASSES: tuple[InPlacePass, ...] = (
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
    common.IdentityEliminationPass(),  # before the chains, whose links copies would separate
    SumsToProducts(),
    MergeChains(),
    MatchRanks(),
    CastsByType(),
    LabelGradients(),
    # Clean-up of what the rewrites leave: new constants, repeated nodes, and names of this machine.
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
    common.DeduplicateInitializersPass(),
    common.CommonSubexpressionEliminationPass(),
    common.RemoveUnusedNodesPass(),
    common.RemoveUnusedOpsetsPass(),
    common.TopologicalSortPass(),
    common.ClearMetadataAndDocStringPass(),
)


def _leading(node: ir.Node) -> int:
    """Return the number of summed axes if they are the first ones of a float32 array, but not all; else 0."""
    if node.op_type != "ReduceSum" or len(node.inputs) < _SUM_INPUTS:
        return 0
    x, given = node.inputs[:_SUM_INPUTS]
    summed = integers(given)
    if x is None or summed is None or x.dtype != ir.DataType.FLOAT:
        return 0
    sizes = static_sizes(x)
    if sizes is None or static_sizes(node.outputs[0]) is None:
        return 0
    axes = sorted(axis % len(sizes) for axis in summed)
    return len(axes) if axes == list(range(len(axes))) and len(axes) < len(sizes) else 0


def _product(x: ir.Value, rows: int, columns: int, sizes: Sequence[int]) -> list[ir.Node]:
    """Return the nodes of ones [1, rows] times x as [rows, columns], reshaped to ``sizes``."""
    number = ir.node("Constant", [], {"value": ir.tensor(np.ones((1, 1), np.float32))})
    wide, matrix, result = map(whole_numbers, ([1, rows], [rows, columns], sizes))
    ones = ir.node("Expand", [number.outputs[0], wide.outputs[0]])
    flat = ir.node("Reshape", [x, matrix.outputs[0]])
    product = ir.node("MatMul", [ones.outputs[0], flat.outputs[0]])
    for made, shape in ((ones, [1, rows]), (flat, [rows, columns]), (product, [1, columns])):
        made.outputs[0].type, made.outputs[0].shape = x.type, ir.Shape(shape)
    back = ir.node("Reshape", [product.outputs[0], result.outputs[0]])
    return [number, wide, matrix, result, ones, flat, product, back]


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
    """Merge a transposition with the one it reads, or remove both if they cancel out."""
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
    """Merge a Reshape with the one it reads, if its shape has no 0, which would copy a size of the inner result."""
    before, shape = made_by(node.inputs[0], "Reshape"), integers(node.inputs[1])
    if before is None or shape is None or 0 in shape:
        return
    if integers(before.inputs[1]) is not None:
        node.replace_input_with(0, before.inputs[0])


def _join_waiting(graph: ir.Graph, node: ir.Node) -> bool:
    """Merge the view ``node`` into the Reshape that it reads, if that delays a value, because runtimes would fuse the two.

    Return False if ``node`` reads no such Reshape.
    """
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
    """Return the computed summand if the Reshape ``node`` delays a value (:mod:`edgefl_export.operators`), else None.

    The shape argument of such a Reshape is the sum of constant sizes and a computed value.
    """
    add = made_by(node.inputs[1], "Add") if node is not None and node.op_type == "Reshape" else None
    if add is None or integers(add.inputs[0]) is None:
        return None
    return add.inputs[1] if integers(add.inputs[1]) is None else None


def _hide_shape(value: ir.Value) -> None:
    """Remove the shape of ``value`` but its rank: onnxruntime would fuse a Reshape of known result and not delay it."""
    if value.shape is not None and not value.is_graph_output():
        value.shape = ir.Shape([None] * len(value.shape))


def _read_elsewhere(node: ir.Node, reader: ir.Node) -> bool:
    value = node.outputs[0]
    return value.is_graph_output() or any(user is not reader for user in value.consumers())


def _slice_arguments(node: ir.Node) -> tuple[list[int], ...] | None:
    """Return (starts, ends, axes, steps) of a Slice if all are constants, else None; axes are not negative."""
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


def _reshape(graph: ir.Graph, reader: ir.Node, value: ir.Value, sizes: list[int]) -> ir.Value:
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


def _is_read(value: ir.Value, times: int) -> bool:
    """Return True if exactly ``times`` nodes read a value and the graph does not return it."""
    return len(value.uses()) == times and not value.is_graph_output()


def _is_laid_out(scatter: ir.Node) -> bool:
    """Return True if ``scatter`` writes one number into each row of a tensor of zeros."""
    data, labels, given = scatter.inputs
    for op in ("Expand", "Cast"):
        node = made_by(data, op)
        data = node.inputs[0] if node is not None else data
    constant = data.const_value if data is not None else None
    if constant is None or labels is None or given is None or np.any(constant.numpy()):
        return False
    axis, sizes = scatter.attributes.get_int("axis", 0), static_sizes(labels) or [0]
    reduced = scatter.attributes.get_string("reduction", "none")
    return sizes[axis] == 1 and static_sizes(given) == sizes and reduced in ("none", "add")


def _sums(value: ir.Value | None, scatter: ir.Node) -> bool:
    """Return True if ``value`` is the sum of the result of ``scatter`` along the axis of the classes."""
    node = made_by(value, "ReduceSum")
    if node is None or node.inputs[0] is not scatter.outputs[0] or not node.attributes.get_int("keepdims", 1):
        return False
    axes, rank = integers(node.inputs[1]), len(static_sizes(scatter.outputs[0]) or ())
    if axes is None or not rank:
        return False
    return [axis % rank for axis in axes] == [scatter.attributes.get_int("axis", 0) % rank]


def _replace_labels(graph: ir.Graph, node: ir.Node, scatter: ir.Node, shares: ir.Value | None) -> None:
    _, labels, given = scatter.inputs
    taken = ir.node("Neg", [given])
    product = ir.node("Mul", [shares, taken.outputs[0]])
    axis = scatter.attributes.get_int("axis", 0)
    added = ir.node(
        "ScatterElements", [product.outputs[0], labels, given], {"axis": axis, "reduction": "add"}
    )
    result = node.outputs[0]
    for made, like in ((taken, given), (product, result), (added, result)):
        if like is not None:
            made.outputs[0].type, made.outputs[0].shape = like.type, like.shape
    convenience.replace_nodes_and_values(
        graph, node, [node], [taken, product, added], [result], added.outputs
    )


def made_by(value: ir.Value | None, op: str) -> ir.Node | None:
    """Return the node that computes ``value`` if it is an ``op`` of the default domain, else None."""
    node = value.producer() if value is not None else None
    return node if node is not None and node.op_type == op and not node.domain else None


def static_sizes(value: ir.Value) -> list[int] | None:
    """Return the sizes of the axes of a value, or None if one is unknown."""
    if value.shape is None or not value.shape.is_static():
        return None
    return [int(size) for size in value.shape.numpy()]


def integers(value: ir.Value | None) -> list[int] | None:
    """Return the entries of a constant of integers, or None for other values."""
    constant = value.const_value if value is not None else None
    return None if constant is None else [int(item) for item in constant.numpy().reshape(-1)]


def whole_numbers(numbers: Sequence[int]) -> ir.Node:
    """Return a Constant node of these integers."""
    return ir.node("Constant", [], {"value": ir.tensor(np.array(numbers, np.int64))})
