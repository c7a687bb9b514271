"""Ops on XNNPACK that move entries and compute nothing."""

from __future__ import annotations

import math
from typing import Any

import torch
from executorch.backends.xnnpack.serialization import xnnpack_graph_schema as xnn
from torch import fx

from exporters.capture.nodes import argument, int_argument, ints_argument, nodes_argument
from exporters.executorch.xnnpack.builder import Builder, Value
from exporters.executorch.xnnpack.emitter import Emitter, shape_of
from exporters.executorch.xnnpack.workspace import NONE

_aten = torch.ops.aten


def _permute(builder: Builder, node: fx.Node) -> None:
    source = builder.read(node.args[0])
    rank = len(source.perm)
    order = _order(node, rank)
    builder.define(node, Value(source.id, source.shape, tuple(source.perm[axis] for axis in order)))


def _order(node: fx.Node, rank: int) -> list[int]:
    if node.target is _aten.permute.default:
        return [axis % rank for axis in ints_argument(node, 1)]
    order = list(range(rank))
    if not rank:
        return order
    swapped = (0, 1) if node.target is _aten.t.default else (int_argument(node, 1), int_argument(node, 2))
    first, second = swapped
    order[first], order[second] = order[second], order[first]
    return order


def _reshape(builder: Builder, node: fx.Node) -> None:
    source = builder.id(node.args[0])
    shape = list(shape_of(node))
    builder.add(xnn.XNNStaticReshape(len(shape), shape, source, builder.result(node).id, 0))


def _slice(builder: Builder, node: fx.Node) -> None:
    shape = shape_of(node.args[0])
    axis = argument(node, "dim") % len(shape)
    start = argument(node, "start") or 0
    offsets = [0] * len(shape)
    offsets[axis] = max(start + shape[axis], 0) if start < 0 else start
    out = builder.result(node).id
    builder.add(
        xnn.XNNStaticSlice(len(shape), offsets, list(shape_of(node)), builder.id(node.args[0]), out, 0)
    )


def _select(builder: Builder, node: fx.Node) -> None:
    shape = shape_of(node.args[0])
    axis = int_argument(node, 1) % len(shape)
    offsets = [0] * len(shape)
    offsets[axis] = int_argument(node, 2) % shape[axis]
    sizes = [1 if index == axis else size for index, size in enumerate(shape)]
    part = builder.value(sizes)
    builder.add(xnn.XNNStaticSlice(len(shape), offsets, sizes, builder.id(node.args[0]), part.id, 0))
    result_shape = list(shape_of(node))
    builder.add(xnn.XNNStaticReshape(len(result_shape), result_shape, part.id, builder.result(node).id, 0))


def _pad(builder: Builder, node: fx.Node) -> None:
    rank, padding = len(shape_of(node)), list(ints_argument(node, 1))
    before, after = [0] * rank, [0] * rank
    for pair in range(len(padding) // 2):
        before[rank - 1 - pair], after[rank - 1 - pair] = padding[2 * pair], padding[2 * pair + 1]
    fill = float(argument(node, "value") or 0.0)
    out = builder.result(node).id
    builder.add(xnn.XNNStaticConstantPad(before, after, fill, builder.id(node.args[0]), out, 0))


def _is_growth(node: fx.Node) -> bool:
    return all(count >= 0 for count in ints_argument(node, 1))


_CONCATENATIONS = {
    2: xnn.XNNConcatenate2,
    3: xnn.XNNConcatenate3,
    4: xnn.XNNConcatenate4,
    5: xnn.XNNConcatenate5,
}


def _cat(builder: Builder, node: fx.Node) -> None:
    shape = shape_of(node)
    axis = argument(node, "dim") % len(shape)
    parts = [(builder.id(part), shape_of(part)[axis]) for part in nodes_argument(node, 0)]
    while len(parts) > 5:
        joined = []
        for start in range(0, len(parts), 5):
            group = parts[start : start + 5]
            size = sum(length for _, length in group)
            if len(group) == 1:
                joined += group
                continue
            made = builder.value((*shape[:axis], size, *shape[axis + 1 :]))
            _join(builder, [id_ for id_, _ in group], axis, made.id)
            joined.append((made.id, size))
        parts = joined
    _join(builder, [id_ for id_, _ in parts], axis, builder.result(node).id)


def _join(builder: Builder, ids: list[int], axis: int, out: int) -> None:
    if len(ids) == 1:
        builder.add(xnn.XNNCopy(ids[0], out, 0))
        return
    padded = [*ids, *[NONE] * (5 - len(ids))]
    builder.add(
        _CONCATENATIONS[len(ids)](
            axis=axis,
            input1_id=padded[0],
            input2_id=padded[1],
            input3_id=padded[2],
            input4_id=padded[3],
            input5_id=padded[4],
            output_id=out,
            flags=0,
        )
    )


def _is_cat(node: fx.Node) -> bool:
    shapes = {len(shape_of(part)) for part in nodes_argument(node, 0)}
    return shapes == {len(shape_of(node))}


def _expand(builder: Builder, node: fx.Node) -> None:
    """Times a row of ones along each axis that grows."""
    shape = shape_of(node)
    before = shape_of(node.args[0])
    before = (1,) * (len(shape) - len(before)) + before
    ones = torch.ones([new if old == 1 else 1 for old, new in zip(before, shape, strict=True)])
    source = builder.reshaped(builder.read(node.args[0]), before)
    builder.add(xnn.XNNMultiply(source.id, builder.constant(None, ones).id, builder.result(node).id, 0))


def _grows(node: fx.Node) -> int:
    shape = shape_of(node)
    before = shape_of(node.args[0])
    before = (1,) * (len(shape) - len(before)) + before
    return math.prod(new if old == 1 else 1 for old, new in zip(before, shape, strict=True))


EMITTERS: dict[Any, Emitter] = {
    _aten.permute.default: Emitter(_permute),
    _aten.transpose.int: Emitter(_permute),
    _aten.t.default: Emitter(_permute, lambda node: len(shape_of(node)) == 2),
    _aten.view_copy.default: Emitter(_reshape),
    _aten.slice.Tensor: Emitter(_slice, lambda node: argument(node, "step") == 1),
    _aten.select.int: Emitter(_select),
    _aten.constant_pad_nd.default: Emitter(_pad, _is_growth),
    _aten.cat.default: Emitter(_cat, _is_cat),
    _aten.expand.default: Emitter(_expand, lambda node: _grows(node) <= 1 << 14),
}
