"""Products in place of sums over leading axes, and products of few rows from the other side.

ONNX Runtime adds the rows one after the other for a few columns at a time, and on several threads for fewer: the sum of 32
rows of 51,200 numbers takes it 0.26 ms, and 2.05 on two threads; the product 0.12 and 0.10 (AMD EPYC, medians).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
from onnx_ir import convenience

from edgefl_export.onnx.nodes import integers, static_sizes, whole_numbers

# Products of few rows with a large matrix, from the other side: the input gradient of a wide dense layer.
#
# ONNX Runtime repacks the right factor of a product before it multiplies, here all of the matrix for few rows. As (B^T
# A^T)^T it repacks the few, and reads the matrix once: it takes transposed factors as they are. 5.9 ms instead of 7.3
# for 32 rows of 2048 and a matrix of 2048x3136 (Intel Xeon); the same either way on an AMD EPYC. Forward, the weight is
# transposed already, and :mod:`edgefl_export.decompositions.linear` does it.

_FEW_LEFT, _MANY_RIGHT = 64, 1 << 20
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
            and 1 < rows <= _FEW_LEFT
            and columns >= 4 * rows
            and math.prod((inner, columns)) >= _MANY_RIGHT
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


_INPUTS = 2
_FEW = 1024
"""Numbers below which nodes more cost more than they spare."""
_ROWS, _FEW_ROWS, _MANY = 1 << 16, 256, 1 << 19
"""Rows at most, as the ones take memory for each; and where more than a few have more numbers than a cache holds, the sum is
as fast: the product reads a few columns of all rows at a time (4096x1152: 0.63 ms and 0.90)."""


def multiply_ones(graph: ir.Graph) -> None:
    """Where all axes up to one are summed, the product of ones and what is left as a matrix."""
    for node in list(graph):
        x, rank = node.inputs[0] if node.inputs else None, _leading(node)
        if x is None or not rank:
            continue
        sizes = static_sizes(x) or []
        rows, columns = math.prod(sizes[:rank]), math.prod(sizes[rank:])
        fits = rows <= _FEW_ROWS or (rows <= _ROWS and rows * columns <= _MANY)
        if not (rows > 1 and fits and columns > 1 and rows * columns >= _FEW):
            continue
        made = _product(x, rows, columns, static_sizes(node.outputs[0]) or [])
        made[-1].outputs[0].type, made[-1].outputs[0].shape = node.outputs[0].type, node.outputs[0].shape
        convenience.replace_nodes_and_values(graph, node, [node], made, node.outputs, made[-1].outputs)


def _leading(node: ir.Node) -> int:
    """How many axes are summed, if they are the first ones of an array of float32 and not all; else 0."""
    if node.op_type != "ReduceSum" or len(node.inputs) < _INPUTS:
        return 0
    x, given = node.inputs[:_INPUTS]
    summed = integers(given)
    if x is None or summed is None or x.dtype != ir.DataType.FLOAT:
        return 0
    sizes = static_sizes(x)
    if sizes is None or static_sizes(node.outputs[0]) is None:
        return 0
    axes = sorted(axis % len(sizes) for axis in summed)
    return len(axes) if axes == list(range(len(axes))) and len(axes) < len(sizes) else 0


def _product(x: ir.Value, rows: int, columns: int, sizes: Sequence[int]) -> list[ir.Node]:
    """Of ones [1, rows] and x as [rows, columns], reshaped to ``sizes``."""
    number = ir.node("Constant", [], {"value": ir.tensor(np.ones((1, 1), np.float32))})
    wide, matrix, result = map(whole_numbers, ([1, rows], [rows, columns], sizes))
    ones = ir.node("Expand", [number.outputs[0], wide.outputs[0]])
    flat = ir.node("Reshape", [x, matrix.outputs[0]])
    product = ir.node("MatMul", [ones.outputs[0], flat.outputs[0]])
    for made, shape in ((ones, [1, rows]), (flat, [rows, columns]), (product, [1, columns])):
        made.outputs[0].type, made.outputs[0].shape = x.type, ir.Shape(shape)
    back = ir.node("Reshape", [product.outputs[0], result.outputs[0]])
    return [number, wide, matrix, result, ones, flat, product, back]
