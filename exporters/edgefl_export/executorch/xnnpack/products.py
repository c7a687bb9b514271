"""Products of matrices, sums and means on XNNPACK."""

from __future__ import annotations

import math
from typing import Any

import torch
from executorch.backends.xnnpack.serialization import xnnpack_graph_schema as xnn
from torch import fx

from edgefl_export.capture.nodes import argument, ints_argument, node_argument
from edgefl_export.executorch.xnnpack.axes import TRANSPOSITIONS, axes_of
from edgefl_export.executorch.xnnpack.builder import (
    TRANSPOSE,
    Builder,
    Condition,
    Emitter,
    TensorValue,
    shape_of,
)
from edgefl_export.executorch.xnnpack.memory import NONE

# Products of matrices on XNNPACK. Either operand may be computed, given or constant; the right one may be transposed.

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
    """Return True if the right factor is so much larger that XNNPACK should pack the left one.

    The product is then computed transposed. So the weights of a wide layer are read once for a few samples and not copied.
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
    """Write left [..., K] times right [K, N] plus bias into ``out``; ``right`` may be stored as its transpose.

    ``bias`` is the number of its value in XNNPACK's graph.
    """
    flag = TRANSPOSE if right.plain else 0
    builder.add(xnn.XNNFullyConnected(left.id, right.id, bias, out.id, flag))


def _batched_product(builder: Builder, node: fx.Node) -> None:
    left, right = node.args[:2]
    other = builder.read(right)
    if other.perm == (0, 2, 1):
        flag, id_ = TRANSPOSE, other.id
    else:
        flag, id_ = 0, builder.plain(other).id
    builder.add(xnn.XNNBatchMatrixMultiply(builder.id(left), id_, builder.result(node).id, flag))


# Sums and means on XNNPACK.

KEEP_AXES = 0x40
"""XNN_FLAG_KEEP_DIMS."""
LONG = 256
"""From so many terms on, a sum is one of partial sums."""
MOST_TERMS, MOST_POOLED, MOST_TURNED = LONG, 1 << 10, 1 << 12
"""Terms that are added one after another: along the last axes, of an image, and, as in the weight's gradient beside them, of
the rows of a matrix."""
MOST_ONES = 1 << 14
"""Entries of the constant that an odd count of terms may take."""


def is_long_sum(node: fx.Node) -> bool:
    """Return True if a sum has so many terms that ExecuTorch's own kernel, which adds them in order, loses digits."""
    return node.target in _SUMS and _count(node) >= MOST_ONES


def _mean(builder: Builder, node: fx.Node) -> None:
    _reduced(builder, node, 1.0 / _count(node))


def _sum(builder: Builder, node: fx.Node) -> None:
    _reduced(builder, node, 1.0)


def _axes(node: fx.Node) -> list[int]:
    rank = len(shape_of(node.args[0]))
    axes = node.args[1] if len(node.args) > 1 else None
    if not rank or axes is None or axes == []:
        return list(range(rank))
    return sorted(axis % rank for axis in ([axes] if isinstance(axes, int) else ints_argument(node, 1)))


def _count(node: fx.Node) -> int:
    return math.prod(shape_of(node.args[0])[axis] for axis in _axes(node))


def _reduced(builder: Builder, node: fx.Node, factor: float) -> None:
    """Write the sum over each run of neighbouring axes, reshaped to [before, run, behind], times ``factor``.

    A sum of 2^k terms is 2^k times their mean, which XNNPACK pools; this is exact, so integers stay integers. An odd number
    of terms is a product with ones, unless it takes too many of them. So is a sum along the last axes, which XNNPACK would
    pool one number at a time.
    """
    shape, runs = list(shape_of(node.args[0])), _runs(_axes(node))
    value = source = builder.stored(node.args[0])
    turned = _turned(builder, node)
    if turned is not None:
        value, runs = _ones_times(builder, turned, turned.shape[0], turned.shape[1], 1), []
    for first, last in reversed(runs):
        before, run = math.prod(shape[:first]), math.prod(shape[first : last + 1])
        behind = math.prod(shape[last + 1 :])
        shape[first : last + 1] = [1] * (last + 1 - first)
        if behind == 1 < before and run <= MOST_ONES:
            for part in [run] if 1 < run <= MOST_TERMS else _parts(run):
                run //= part
                value = _ones_times(builder, value, before * run, part, behind)
            continue
        odd = run // (run & -run)
        if (before if behind > 1 else 1) * odd > MOST_ONES:
            odd = 1  # pooled with the rest
        if _is_image(value, before, run, behind) and odd == 1:
            images = value.shape[0]
            pooled = builder.value((images, 1, 1, behind))
            builder.add(xnn.XNNGlobalAvgPooling2d(value.id, pooled.id, KEEP_AXES))
            value, factor, run = pooled, factor * (run // images), images
        for part in _parts(run // odd):
            run //= part
            pooled = builder.value((before * run, 1, 1, behind))
            image = builder.reshaped(value, (before * run, part, 1, behind))
            builder.add(xnn.XNNGlobalAvgPooling2d(image.id, pooled.id, KEEP_AXES))
            value, factor = pooled, factor * part
        if odd > 1:
            value = _ones_times(builder, value, before, odd, behind)
    if factor != 1.0:
        scaled = builder.value(value.shape)
        builder.add(xnn.XNNMultiply(value.id, builder.number(factor).id, scaled.id, 0))
        value = scaled
    if value is source:  # another name for what is read would be read later than its node runs
        value = builder.result(node)
        builder.add(xnn.XNNStaticReshape(len(value.shape), list(value.shape), source.id, value.id, 0))
    builder.define(node, value)


def _turned(builder: Builder, node: fx.Node) -> TensorValue | None:
    """Return the transpose of the matrix whose rows ``node`` sums, if the delegate has computed it already; else None.

    A weight's gradient reads that transpose.
    """
    matrix = node_argument(node, 0)
    shape = shape_of(matrix)
    if len(shape) != 2 or _axes(node) != [0] or not LONG <= shape[0] <= MOST_TURNED:
        return None
    turns = (user for user in matrix.users if user.target in TRANSPOSITIONS and axes_of(user, 2) == [1, 0])
    known = next((user for user in turns if builder.is_known(user)), None)
    return None if known is None else builder.plain(builder.read(known))


def _is_image(value: TensorValue, before: int, run: int, behind: int) -> bool:
    """Return True if XNNPACK can compute the sum over the middle axis of [before, run, behind] by pooling images [N,
    H, W, C], without a reshape.
    """
    if before != 1 or len(value.shape) != 4 or value.shape[3] != behind:
        return False
    return 1 < run // value.shape[0] <= MOST_POOLED


def _ones_times(builder: Builder, value: TensorValue, before: int, run: int, behind: int) -> TensorValue:
    """Return the sum over the middle axis of [before, run, behind], as a product with ones."""
    if behind > 1:
        ones = builder.constant(torch.ones(before, 1, run))
        source, made = builder.reshaped(value, (before, run, behind)), builder.value((before, 1, behind))
        builder.add(xnn.XNNBatchMatrixMultiply(ones.id, source.id, made.id, 0))
        return made
    # As it is, where it can be: another shape of a value that more is done with is a copy.
    fits = len(value.shape) > 1 and value.shape[-1] == run
    source = value if fits else builder.reshaped(value, (before, 1, run))
    made = builder.value((*source.shape[:-1], 1))
    ones = builder.constant(torch.ones(1, run))
    builder.add(xnn.XNNFullyConnected(source.id, ones.id, NONE, made.id, 0))
    return made


def _parts(run: int) -> list[int]:
    """Return one or two factors above 1 whose product is the number of terms ``run``: two for a long sum, if it can be
    divided.

    A sum of sums has a smaller rounding error than one long sum.
    """
    if run < LONG:
        return [run] if run > 1 else []
    first = next(part for part in range(math.isqrt(run), 0, -1) if run % part == 0)
    return [part for part in (first, run // first) if part > 1]


def _runs(axes: list[int]) -> list[tuple[int, int]]:
    """Return runs of neighbouring axes as (first, last)."""
    runs: list[tuple[int, int]] = []
    for axis in axes:
        if runs and runs[-1][1] == axis - 1:
            runs[-1] = (runs[-1][0], axis)
        else:
            runs.append((axis, axis))
    return runs


_SUMS: dict[Any, Emitter] = {_aten.mean.dim: _mean, _aten.mean.default: _mean, _aten.sum.dim_IntList: _sum}
PRODUCTS: dict[Any, Emitter] = {
    _aten.mm.default: _product,
    _aten.addmm.default: _biased_product,
    _aten.linear.default: _linear,
    _aten.bmm.default: _batched_product,
}
EMITTERS = {**PRODUCTS, **_SUMS}
CONDITIONS: dict[Any, Condition] = {
    _aten.addmm.default: lambda node: bool(argument(node, "alpha") == 1 and argument(node, "beta") == 1)
}
