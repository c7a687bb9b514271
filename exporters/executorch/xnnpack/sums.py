"""Sums and means on XNNPACK."""

from __future__ import annotations

import math
from typing import Any

import torch
from executorch.backends.xnnpack.serialization import xnnpack_graph_schema as xnn
from torch import fx

from exporters.capture.nodes import ints_argument
from exporters.executorch.xnnpack.builder import Builder, Value
from exporters.executorch.xnnpack.emitter import Emitter, shape_of
from exporters.executorch.xnnpack.workspace import NONE

_aten = torch.ops.aten

LONG = 256
"""From so many terms on, a sum is one of partial sums."""
MOST_ONES = 1 << 14
"""Entries of the constant that an odd count of terms may take."""


def is_long_sum(node: fx.Node) -> bool:
    """Whether so many terms are added that ExecuTorch's own kernel, which adds one after another, loses digits."""
    return node.target in EMITTERS and _count(node) >= MOST_ONES


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
    """The sum over each run of neighbouring axes, seen as [before, run, behind]; then times ``factor``.

    A sum of 2^k terms is their mean, which XNNPACK pools, times 2^k: without rounding, so that whole numbers stay whole.
    An odd count of terms is a product with ones, unless it takes too many of them.
    """
    shape = list(shape_of(node.args[0]))
    value = builder.plain(builder.read(node.args[0]))
    for first, last in reversed(_runs(_axes(node))):
        before, run = math.prod(shape[:first]), math.prod(shape[first : last + 1])
        behind = math.prod(shape[last + 1 :])
        shape[first : last + 1] = [1] * (last + 1 - first)
        odd = run // (run & -run)
        if (before if behind > 1 else 1) * odd > MOST_ONES:
            odd = 1  # pooled with the rest
        for part in _parts(run // odd):
            run //= part
            pooled = builder.value((before * run, 1, 1, behind))
            source = builder.reshaped(value, (before * run, part, 1, behind))
            builder.add(xnn.XNNGlobalAvgPooling2d(source.id, pooled.id, 0))
            value, factor = pooled, factor * part
        if odd > 1:
            value = _ones_times(builder, value, before, odd, behind)
    if factor != 1.0:
        scaled = builder.value(value.shape)
        builder.add(xnn.XNNMultiply(value.id, builder.number(factor).id, scaled.id, 0))
        value = scaled
    result_shape = list(shape_of(node))
    builder.add(xnn.XNNStaticReshape(len(result_shape), result_shape, value.id, builder.result(node).id, 0))


def _ones_times(builder: Builder, value: Value, before: int, run: int, behind: int) -> Value:
    """The sum over the middle of [before, run, behind]."""
    made = builder.value((before, 1, behind))
    if behind == 1:
        ones = builder.constant(None, torch.ones(1, run))
        source = builder.reshaped(value, (before, 1, run))
        builder.add(xnn.XNNFullyConnected(source.id, ones.id, NONE, made.id, 0))
    else:
        ones = builder.constant(None, torch.ones(before, 1, run))
        source = builder.reshaped(value, (before, run, behind))
        builder.add(xnn.XNNBatchMatrixMultiply(ones.id, source.id, made.id, 0))
    return made


def _parts(run: int) -> list[int]:
    """A long run as two factors: sums of sums round less than one long sum."""
    if run < LONG:
        return [run] if run > 1 else []
    first = next(part for part in range(math.isqrt(run), 0, -1) if run % part == 0)
    return [part for part in (first, run // first) if part > 1]


def _runs(axes: list[int]) -> list[tuple[int, int]]:
    """Neighbouring axes as (first, last)."""
    runs: list[tuple[int, int]] = []
    for axis in axes:
        if runs and runs[-1][1] == axis - 1:
            runs[-1] = (runs[-1][0], axis)
        else:
            runs.append((axis, axis))
    return runs


EMITTERS: dict[Any, Emitter] = {
    _aten.mean.dim: Emitter(_mean),
    _aten.mean.default: Emitter(_mean),
    _aten.sum.dim_IntList: Emitter(_sum),
}
