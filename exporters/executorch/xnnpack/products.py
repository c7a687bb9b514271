"""Products of matrices on XNNPACK. Either operand may be computed, given or constant; the right one may be transposed."""

from __future__ import annotations

from typing import Any

import torch
from executorch.backends.xnnpack.serialization import xnnpack_graph_schema as xnn
from torch import fx

from exporters.capture.nodes import argument
from exporters.executorch.xnnpack.builder import Builder, Value
from exporters.executorch.xnnpack.emitter import TRANSPOSE, Emitter, shape_of
from exporters.executorch.xnnpack.workspace import NONE

_aten = torch.ops.aten


def _product(builder: Builder, node: fx.Node) -> None:
    left, right = node.args[:2]
    _multiply(builder, node, left, builder.read(right), NONE)


def _biased_product(builder: Builder, node: fx.Node) -> None:
    bias, left, right = node.args[:3]
    if shape_of(bias) in ((shape_of(node)[1],), (1, shape_of(node)[1])) and _is_constant(bias):
        _multiply(builder, node, left, builder.read(right), builder.id(bias))
        return
    product = builder.value(shape_of(node))
    _multiply_into(builder, left, builder.read(right), NONE, product)
    builder.add(xnn.XNNAdd(product.id, builder.id(bias), builder.result(node).id, 0))


def _is_constant(node: Any) -> bool:
    return bool(node.op == "get_attr")


def _linear(builder: Builder, node: fx.Node) -> None:
    left, right = node.args[:2]
    weight = builder.read(right)
    turned = Value(weight.id, weight.shape, tuple(reversed(weight.perm)))
    bias = argument(node, "bias")
    product = builder.result(node) if bias is None else builder.value(shape_of(node))
    _multiply_into(builder, left, turned, NONE, product)
    if bias is not None:
        builder.add(xnn.XNNAdd(product.id, builder.id(bias), builder.result(node).id, 0))


def _multiply(builder: Builder, node: fx.Node, left: Any, right: Value, bias: int) -> None:
    _multiply_into(builder, left, right, bias, builder.result(node))


def _multiply_into(builder: Builder, left: Any, right: Value, bias: int, out: Value) -> None:
    """left [..., K] times right, read as [K, N]: stored so, or as its transpose."""
    flag = TRANSPOSE if right.plain else 0
    builder.add(xnn.XNNFullyConnected(builder.id(left), right.id, bias, out.id, flag))


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
