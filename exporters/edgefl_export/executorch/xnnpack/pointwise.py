"""Element-wise ops and softmax on XNNPACK."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from executorch.backends.xnnpack.serialization import xnnpack_graph_schema as xnn
from torch import fx

from edgefl_export.capture.nodes import argument, int_argument
from edgefl_export.executorch.graph import VIEWS
from edgefl_export.executorch.xnnpack.builder import Builder, Condition, Emitter, TensorValue, shape_of
from edgefl_export.operators import aten_ops

_aten = torch.ops.aten


def _binary(builder: Builder, node: fx.Node) -> None:
    first, second = node.args[:2]
    if node.target is _aten.rsub.Scalar:
        first, second = second, first
    low, high, shape = _operands(builder, node, first, second)
    builder.add(_BINARY[node.target](low.id, high.id, builder.result(node, shape).id, 0))


def _operands(
    builder: Builder, node: fx.Node, first: Any, second: Any
) -> tuple[TensorValue, TensorValue, Sequence[int]]:
    """Return (first operand, second operand, shape of the result) of an element-wise op on two arguments.

    The values have the shapes in which they are stored if these broadcast to the same entries. Otherwise they are
    reshaped to the shapes of the nodes.
    """
    low, high = builder.stored(first), builder.stored(second)
    count = math.prod(shape_of(node)) if builder.is_inner(node) else 0
    if math.prod(low.shape) == count and (other := _fit_shape(builder, node, low, second, high)) is not None:
        return low, other, low.shape
    if math.prod(high.shape) == count and (other := _fit_shape(builder, node, high, first, low)) is not None:
        return other, high, high.shape
    return builder.plain(builder.read(first)), builder.plain(builder.read(second)), shape_of(node)


def _fit_shape(
    builder: Builder, node: fx.Node, full: TensorValue, argument: Any, value: TensorValue
) -> TensorValue | None:
    """Return ``argument``, stored as ``value``, in a shape that broadcasts to the stored shape of ``full``.

    That is possible if it has as many entries as ``full``, or a single one. It is also possible with one entry for
    each index of the last axis, or for each combination of the other axes. Return None otherwise.
    """
    count, last = math.prod(value.shape), full.shape[-1:]
    if count == math.prod(full.shape):
        return (
            builder.reshaped(value, full.shape)
            if _is_read_once(argument) or value.shape == full.shape
            else None
        )
    if count == 1:
        return value if len(value.shape) <= len(full.shape) else None
    if last != shape_of(node)[-1:] or not isinstance(argument, fx.Node):
        return None
    if shape_of(argument)[-1:] == (count,) == last:
        return builder.reshaped(value, last)
    if shape_of(argument)[-1:] == (1,) and count * last[0] == math.prod(full.shape):
        return builder.reshaped(value, (*full.shape[:-1], 1))
    return None


def _is_read_once(argument: Any) -> bool:
    while isinstance(argument, fx.Node) and len(argument.users) == 1:
        if argument.target not in VIEWS:
            return argument.op == "call_function"
        argument = argument.args[0]
    return False


def _single(builder: Builder, node: fx.Node) -> tuple[int, TensorValue]:
    """Return (number of the stored argument, value for the result) of an op with one argument."""
    if not builder.is_inner(node):
        return builder.id(node.args[0]), builder.result(node)
    source = builder.stored(node.args[0])
    return source.id, builder.result(node, source.shape)


def _is_binary(node: fx.Node) -> bool:
    """Return True if the operands are tensors or numbers and there is no scale argument such as ``alpha``."""
    numbers = all(isinstance(item, (fx.Node, int, float)) for item in node.args[:2])
    factor = node.kwargs.get("alpha", node.args[2] if len(node.args) > 2 else 1)
    return numbers and bool(factor == 1) and not node.kwargs.get("rounding_mode")


def _unary(builder: Builder, node: fx.Node) -> None:
    source, out = _single(builder, node)
    builder.add(_UNARY[node.target](source, out.id, 0))


def _clamp(builder: Builder, node: fx.Node) -> None:
    low, high = _BOUNDS[node.target](node)
    source, out = _single(builder, node)
    builder.add(xnn.XNNClamp(source, out.id, 0), low, high)


def _is_clamp(node: fx.Node) -> bool:
    low, high = _BOUNDS[node.target](node)
    return (low is not None or high is not None) and (low is None or high is None or low < high)


def _power(builder: Builder, node: fx.Node) -> None:
    exponent = float(node.args[1])  # type: ignore[arg-type]
    source, result = _single(builder, node)
    out = result.id
    if exponent == 3.0:
        square = builder.value(result.shape)
        builder.add(xnn.XNNSquare(source, square.id, 0))
        builder.add(xnn.XNNMultiply(square.id, source, out, 0))
    elif exponent == -2.0:
        square = builder.value(result.shape)
        builder.add(xnn.XNNSquare(source, square.id, 0))
        builder.add(xnn.XNNDiv(builder.number(1.0).id, square.id, out, 0))
    elif exponent == -1.0:
        builder.add(xnn.XNNDiv(builder.number(1.0).id, source, out, 0))
    else:
        builder.add(_POWERS[exponent](source, out, 0))


_POWERS = {2.0: xnn.XNNSquare, 0.5: xnn.XNNSquareRoot, -0.5: xnn.XNNReciprocalSquareRoot, 1.0: xnn.XNNCopy}


def _is_power(node: fx.Node) -> bool:
    return isinstance(node.args[1], (int, float)) and float(node.args[1]) in (*_POWERS, 3.0, -1.0, -2.0)


def _reciprocal(builder: Builder, node: fx.Node) -> None:
    source, out = _single(builder, node)
    builder.add(xnn.XNNDiv(builder.number(1.0).id, source, out.id, 0))


def _is_softmax(node: fx.Node) -> bool:
    rank = len(shape_of(node))
    return rank > 0 and int_argument(node, 1) % rank == rank - 1 and node.args[2] is False


def _softmax(builder: Builder, node: fx.Node) -> None:
    builder.add(xnn.XNNSoftmax(builder.id(node.args[0]), builder.result(node).id, 0))


_BINARY: dict[Any, Any] = {
    **dict.fromkeys(aten_ops("add.Tensor add.Scalar"), xnn.XNNAdd),
    **dict.fromkeys(aten_ops("sub.Tensor sub.Scalar rsub.Scalar"), xnn.XNNSubtract),
    **dict.fromkeys(aten_ops("mul.Tensor mul.Scalar"), xnn.XNNMultiply),
    **dict.fromkeys(aten_ops("div.Tensor div.Scalar"), xnn.XNNDiv),
    _aten.maximum.default: xnn.XNNMaximum,
    _aten.minimum.default: xnn.XNNMinimum,
}
_UNARY: dict[Any, Any] = {
    _aten.abs.default: xnn.XNNAbs,
    _aten.neg.default: xnn.XNNNegate,
    _aten.ceil.default: xnn.XNNCeiling,
    _aten.floor.default: xnn.XNNFloor,
    _aten.exp.default: xnn.XNNExp,
    _aten.log.default: xnn.XNNLog,
    _aten.sqrt.default: xnn.XNNSquareRoot,
    _aten.rsqrt.default: xnn.XNNReciprocalSquareRoot,
    _aten.tanh.default: xnn.XNNTanh,
    _aten.sigmoid.default: xnn.XNNSigmoid,
    _aten.sin.default: xnn.XNNSin,
    _aten.cos.default: xnn.XNNCos,
    _aten.clone.default: xnn.XNNCopy,
    _aten.gelu.default: xnn.XNNGelu,
    _aten._to_copy.default: xnn.XNNConvert,
}
_BOUNDS: dict[Any, Callable[[fx.Node], tuple[Any, Any]]] = {
    _aten.relu.default: lambda node: (0.0, None),
    _aten.clamp.default: lambda node: (argument(node, "min"), argument(node, "max")),
    _aten.clamp_min.default: lambda node: (node.args[1], None),
    _aten.clamp_max.default: lambda node: (None, node.args[1]),
    _aten.hardtanh.default: lambda node: (argument(node, "min_val"), argument(node, "max_val")),
}
EMITTERS: dict[Any, Emitter] = {
    **dict.fromkeys(_BINARY, _binary),
    **dict.fromkeys(_UNARY, _unary),
    **dict.fromkeys(_BOUNDS, _clamp),
    _aten.pow.Tensor_Scalar: _power,
    _aten.reciprocal.default: _reciprocal,
    _aten._softmax.default: _softmax,
}
CONDITIONS: dict[Any, Condition] = {
    **dict.fromkeys(_BINARY, _is_binary),
    **dict.fromkeys(_BOUNDS, _is_clamp),
    _aten.gelu.default: lambda node: argument(node, "approximate") == "none",
    _aten.pow.Tensor_Scalar: _is_power,
    _aten._softmax.default: _is_softmax,
}
