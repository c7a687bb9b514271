"""Products of few rows with a large matrix, from the other side: the input gradient of a wide dense layer.

ONNX Runtime repacks the right factor of a product before it multiplies, here all of the matrix for few rows. As (B^T A^T)^T
it repacks the few, and reads the matrix once: it takes transposed factors as they are. 5.9 ms instead of 7.3 for 32 rows of
2048 and a matrix of 2048x3136 (Intel Xeon); the same either way on an AMD EPYC. Forward, the weight is transposed already,
and :mod:`exporters.decompositions.linear` does it.
"""

from __future__ import annotations

import math

import onnx_ir as ir
from onnx_ir import convenience

from exporters.onnx.broadcasts import static_sizes

_FEW, _MANY = 64, 1 << 20
_MATRIX = 2


def multiply_from_the_left(graph: ir.Graph) -> None:
    """Where the left factor has few rows, and the right one is an input of many numbers."""
    for node in list(graph):
        left, right = node.inputs[:_MATRIX] if node.op_type == "MatMul" else (None, None)
        sizes = [static_sizes(value) for value in (left, right) if value is not None]
        if left is None or right is None or [len(each or ()) for each in sizes] != [_MATRIX, _MATRIX]:
            continue
        (rows, _), (inner, columns) = (each or [] for each in sizes)
        if (
            right.is_graph_input()
            and 1 < rows <= _FEW
            and columns >= 4 * rows
            and math.prod((inner, columns)) >= _MANY
        ):
            _replace(graph, node, left, right)


def _replace(graph: ir.Graph, node: ir.Node, left: ir.Value, right: ir.Value) -> None:
    turned = [ir.node("Transpose", [value], {"perm": [1, 0]}) for value in (right, left)]
    product = ir.node("MatMul", [each.outputs[0] for each in turned])
    back = ir.node("Transpose", product.outputs, {"perm": [1, 0]})
    for made, like in zip((*turned, product), (right, left, node.outputs[0]), strict=True):
        made.outputs[0].type, made.outputs[0].shape = like.type, ir.Shape((static_sizes(like) or [])[::-1])
    result = node.outputs[0]
    back.outputs[0].type, back.outputs[0].shape = result.type, result.shape
    convenience.replace_nodes_and_values(
        graph, node, [node], [*turned, product, back], [result], back.outputs
    )
