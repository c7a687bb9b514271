"""The gradient of a logarithm of softmax at one class for each row: what cross entropy's backward pass comes to.

As it is derived, the gradient g of the label's entry is laid out among zeros, summed again, and what softmax takes is
subtracted, each through all classes::

    s = ScatterElements(0, label, g);  s - p * ReduceSum(s)   ->   ScatterElements(p * -g, label, g, reduction=add)

The numbers are the same: a sum with zeros is g, and -a + g is g - a.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnx_ir import convenience

from edgefl_export.onnx.nodes import integers, made_by, static_sizes


def add_labels(graph: ir.Graph) -> None:
    """Wherever a graph has it in the left form, and needs what is laid out for nothing else."""
    for node in list(graph):
        left, right = node.inputs if node.op_type == "Sub" else (None, None)
        scatter, product = made_by(left, "ScatterElements"), made_by(right, "Mul")
        if scatter is None or product is None or not _is_laid_out(scatter):
            continue
        total = next((value for value in product.inputs if _sums(value, scatter)), None)
        if total is None or not (_is_read(scatter.outputs[0], 2) and _is_read(total, 1)):
            continue
        shares = product.inputs[1 - product.inputs.index(total)]
        _replace(graph, node, scatter, shares)


def _is_read(value: ir.Value, times: int) -> bool:
    """Whether so many nodes read it, and nobody else."""
    return len(value.uses()) == times and not value.is_graph_output()


def _is_laid_out(scatter: ir.Node) -> bool:
    """Whether one number for each row is put among zeros."""
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
    """Whether it is the sum of what is laid out, along the axis of the classes."""
    node = made_by(value, "ReduceSum")
    if node is None or node.inputs[0] is not scatter.outputs[0] or not node.attributes.get_int("keepdims", 1):
        return False
    axes, rank = integers(node.inputs[1]), len(static_sizes(scatter.outputs[0]) or ())
    if axes is None or not rank:
        return False
    return [axis % rank for axis in axes] == [scatter.attributes.get_int("axis", 0) % rank]


def _replace(graph: ir.Graph, node: ir.Node, scatter: ir.Node, shares: ir.Value | None) -> None:
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
