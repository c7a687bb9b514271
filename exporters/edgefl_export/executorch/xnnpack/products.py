"""Products of matrices on XNNPACK. Either operand may be computed, given or constant; the right one may be transposed."""

from __future__ import annotations

import math
from typing import Any

import torch
from executorch.backends.xnnpack.serialization import xnnpack_graph_schema as xnn
from torch import fx

from edgefl_export.capture.nodes import argument
from edgefl_export.executorch.xnnpack.builder import Builder, TensorValue
from edgefl_export.executorch.xnnpack.emitter import TRANSPOSE, Emitter, shape_of
from edgefl_export.executorch.xnnpack.workspace import NONE

_aten = torch.ops.aten

FEW_ROWS, MANY_WEIGHTS = 64, 1 << 20
"""Rows of a left factor and numbers of a right one, from which on the right one is taken as the left."""


def _product(builder: Builder, node: fx.Node) -> None:
    left, right = node.args[:2]
    _multiply(builder, node, left, builder.read(right), NONE)


def _biased_product(builder: Builder, node: fx.Node) -> None:
    bias, left, right = node.args[:3]
    if shape_of(bias) in ((shape_of(node)[1],), (1, shape_of(node)[1])) and _is_constant(bias):
        _multiply(builder, node, left, builder.read(right), builder.id(bias))
        return
    _biased(builder, node, left, builder.read(right), bias)


def _biased(builder: Builder, node: fx.Node, left: Any, right: TensorValue, bias: Any) -> None:
    if _is_from_the_other_side(left, right):
        product = builder.plain(_from_the_other_side(builder, left, right))
    else:
        product = builder.value(shape_of(node))
        _multiply_into(builder, builder.plain(builder.read(left)), right, NONE, product)
    builder.add(xnn.XNNAdd(product.id, builder.id(bias), builder.result(node).id, 0))


def _is_constant(node: Any) -> bool:
    return bool(node.op == "get_attr")


def _linear(builder: Builder, node: fx.Node) -> None:
    left, right = node.args[:2]
    weight = builder.read(right)
    turned = TensorValue(weight.id, weight.shape, tuple(reversed(weight.perm)))
    bias = argument(node, "bias")
    if bias is None:
        _multiply(builder, node, left, turned, NONE)
    else:
        _biased(builder, node, left, turned, bias)


def _multiply(builder: Builder, node: fx.Node, left: Any, right: TensorValue, bias: int) -> None:
    if bias == NONE and _is_from_the_other_side(left, right):
        builder.define(node, _from_the_other_side(builder, left, right))
        return
    rows = builder.stored(left)
    latest = builder.latest(rows)
    rows = latest if latest.shape[-1:] == shape_of(left)[-1:] else rows
    if not builder.is_inner(node) or rows.shape[-1:] != shape_of(left)[-1:]:
        rows = builder.plain(builder.read(left))
    out = builder.result(node, (*rows.shape[:-1], shape_of(node)[-1]))
    _multiply_into(builder, rows, right, bias, out)


def _is_from_the_other_side(left: Any, right: TensorValue) -> bool:
    """Return True if the right factor is so much larger that XNNPACK should pack the left one, with the product transposed.

    The weights of a wide layer for a few samples are read once then, and not copied.
    """
    count = math.prod(shape_of(left)[:-1])
    return (
        not right.plain
        and len(right.shape) == len(shape_of(left)) == 2
        and (count <= FEW_ROWS and math.prod(right.shape) >= MANY_WEIGHTS)
    )


def _from_the_other_side(builder: Builder, left: Any, right: TensorValue) -> TensorValue:
    few = builder.plain(builder.read(left))
    turned = builder.value((right.shape[0], few.shape[0]))
    builder.add(xnn.XNNFullyConnected(right.id, few.id, NONE, turned.id, 0))
    return TensorValue(turned.id, turned.shape, (1, 0))


def _multiply_into(
    builder: Builder, left: TensorValue, right: TensorValue, bias: int, out: TensorValue
) -> None:
    """left [..., K] times right, read as [K, N]: stored so, or as its transpose."""
    flag = TRANSPOSE if right.plain else 0
    builder.add(xnn.XNNFullyConnected(left.id, right.id, bias, out.id, flag))


def _is_unscaled(node: fx.Node) -> bool:
    return bool(argument(node, "alpha") == 1 and argument(node, "beta") == 1)


def _batched_product(builder: Builder, node: fx.Node) -> None:
    left, right = node.args[:2]
    other = builder.read(right)
    if other.perm == (0, 2, 1):
        flag, id_ = TRANSPOSE, other.id
    else:
        flag, id_ = 0, builder.plain(other).id
    builder.add(xnn.XNNBatchMatrixMultiply(builder.id(left), id_, builder.result(node).id, flag))


EMITTERS: dict[Any, Emitter] = {
    _aten.mm.default: Emitter(_product, work=10.0),
    _aten.addmm.default: Emitter(_biased_product, _is_unscaled, work=10.0),
    _aten.linear.default: Emitter(_linear, work=10.0),
    _aten.bmm.default: Emitter(_batched_product, work=10.0),
}
