"""Ops on XNNPACK that move entries and compute nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from executorch.backends.xnnpack.serialization import xnnpack_graph_schema as xnn
from torch import fx

from edgefl_export.capture.nodes import argument, int_argument, ints_argument, nodes_argument
from edgefl_export.executorch.xnnpack.builder import Builder, Condition, Emitter, TensorValue, shape_of
from edgefl_export.executorch.xnnpack.memory import NONE

_aten = torch.ops.aten

MOST_FILL = 1 << 12
"""Numbers of a block of padding that is a constant of the program."""


def _permute(builder: Builder, node: fx.Node) -> None:
    made = builder.raw(node.args[0])
    rank = len(made.shape)
    if rank > 2 and made.plain and _is_turned(node, made.shape[-1]):
        builder.define(node, TensorValue(made.id, made.shape, (rank - 1, *range(rank - 1))))
        return
    source = builder.read(node.args[0])
    rank = len(source.perm)
    order = axes_of(node, rank)
    builder.define(node, TensorValue(source.id, source.shape, tuple(source.perm[axis] for axis in order)))


def _is_turned(node: fx.Node, last: int) -> bool:
    """Return True if ``node`` is the transposition of a matrix that only matrix products read, as their left factor.

    ``last`` is the size of the last axis of the value that is transposed; its stored value may have more axes.
    """
    if len(shape_of(node)) != 2 or shape_of(node)[0] != last or axes_of(node, 2) != [1, 0]:
        return False
    mm = _aten.mm.default
    return all(user.target is mm and node is user.args[0] is not user.args[1] for user in node.users)


def axes_of(node: fx.Node, rank: int) -> list[int]:
    """Return the permutation of the transposition ``node`` of ``rank`` axes: entry i is the axis of the argument that
    becomes axis i of the result.
    """
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
    """Write a padding as concatenations with constant blocks, axis by axis: XNNPACK's own padding takes several times
    as long.
    """
    value, fill = builder.plain(builder.read(node.args[0])), float(argument(node, "value") or 0.0)
    grown = list(shape_of(node.args[0]))
    pairs = [pair for pair in _pairs(node) if any(pair[1:])]
    if not pairs:
        builder.add(xnn.XNNCopy(value.id, builder.result(node).id, 0))
    for place, (axis, before, behind) in enumerate(pairs):
        blocks = [_filled(builder, _resized(grown, axis, count), fill) for count in (before, behind)]
        grown[axis] += before + behind
        out = builder.result(node) if place == len(pairs) - 1 else builder.value(grown)
        _join(builder, [part.id for part in (blocks[0], value, blocks[1]) if part is not None], axis, out.id)
        value = out


def _pairs(node: fx.Node) -> list[tuple[int, int, int]]:
    """Return (axis, entries before, entries behind) for each padded axis, the last axis first."""
    padding, last = ints_argument(node, 1), len(shape_of(node)) - 1
    return [(last - at, padding[2 * at], padding[2 * at + 1]) for at in range(len(padding) // 2)]


def _resized(shape: Sequence[int], axis: int, size: int) -> list[int]:
    return [*shape[:axis], size, *shape[axis + 1 :]]


def _filled(builder: Builder, shape: Sequence[int], number: float) -> TensorValue | None:
    if not math.prod(shape):
        return None
    if math.prod(shape) <= MOST_FILL:
        return builder.constant(torch.full(tuple(shape), number))
    single = builder.constant(torch.full([1] * len(shape), number))
    made = builder.value(shape)
    after = [size - 1 for size in shape]
    builder.add(xnn.XNNStaticConstantPad([0] * len(shape), after, number, single.id, made.id, 0))
    return made


def _is_growth(node: fx.Node) -> bool:
    return all(count >= 0 for count in ints_argument(node, 1))


MOST_PARTS = 5
_CONCATENATIONS = {parts: getattr(xnn, f"XNNConcatenate{parts}") for parts in range(2, MOST_PARTS + 1)}


def _cat(builder: Builder, node: fx.Node) -> None:
    shape = shape_of(node)
    axis = argument(node, "dim") % len(shape)
    parts = [(builder.id(part), shape_of(part)[axis]) for part in nodes_argument(node, 0)]
    while len(parts) > MOST_PARTS:
        joined, excess = [], len(parts) - MOST_PARTS
        while excess > 0 and len(parts) > 1:  # as few as must be are copied once more
            count = min(MOST_PARTS, excess + 1, len(parts))
            size = sum(length for _, length in parts[:count])
            made = builder.value((*shape[:axis], size, *shape[axis + 1 :]))
            _join(builder, [id_ for id_, _ in parts[:count]], axis, made.id)
            joined.append((made.id, size))
            parts, excess = parts[count:], excess - count + 1
        parts = joined + parts
    _join(builder, [id_ for id_, _ in parts], axis, builder.result(node).id)


def _join(builder: Builder, ids: list[int], axis: int, out: int) -> None:
    if len(ids) == 1:
        builder.add(xnn.XNNCopy(ids[0], out, 0))
        return
    second, third, fourth, fifth = [*ids[1:], *[NONE] * (MOST_PARTS - len(ids))]
    builder.add(_CONCATENATIONS[len(ids)](axis, ids[0], second, third, fourth, out, 0, fifth))


def _is_cat(node: fx.Node) -> bool:
    shapes = {len(shape_of(part)) for part in nodes_argument(node, 0)}
    return shapes == {len(shape_of(node))}


def _expand(builder: Builder, node: fx.Node) -> None:
    """Write an expansion as a product with ones, which broadcasts each axis that grows."""
    shape = shape_of(node)
    before = shape_of(node.args[0])
    before = (1,) * (len(shape) - len(before)) + before
    ones = torch.ones([new if old == 1 else 1 for old, new in zip(before, shape, strict=True)])
    source = builder.reshaped(builder.read(node.args[0]), before)
    builder.add(xnn.XNNMultiply(source.id, builder.constant(ones).id, builder.result(node).id, 0))


def _grows(node: fx.Node) -> int:
    shape = shape_of(node)
    before = shape_of(node.args[0])
    before = (1,) * (len(shape) - len(before)) + before
    return math.prod(new if old == 1 else 1 for old, new in zip(before, shape, strict=True))


TRANSPOSITIONS = (_aten.permute.default, _aten.transpose.int, _aten.t.default)

EMITTERS: dict[Any, Emitter] = {
    **dict.fromkeys(TRANSPOSITIONS, _permute),
    _aten.view_copy.default: _reshape,
    _aten.slice.Tensor: _slice,
    _aten.select.int: _select,
    _aten.constant_pad_nd.default: _pad,
    _aten.cat.default: _cat,
    _aten.expand.default: _expand,
}
CONDITIONS: dict[Any, Condition] = {
    _aten.t.default: lambda node: len(shape_of(node)) == 2,
    _aten.slice.Tensor: lambda node: argument(node, "step") == 1,
    _aten.constant_pad_nd.default: _is_growth,
    _aten.cat.default: _is_cat,
    _aten.expand.default: lambda node: _grows(node) <= 1 << 14,
}
