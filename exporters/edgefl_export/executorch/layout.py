"""Transpositions moved down the graph until they meet their inverse.

The rules for convolutions, pooling and batch normalization work channels last and turn their results back. Between two of
them is a transposition and its inverse, with activations, sums and joins in between. A transposition before such an op can
also come after it; two that meet become one or none. The remaining ones move data: at the edges of the graph, and where a
product needs its left factor transposed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor, fx

from edgefl_export.capture.nodes import (
    broadcast_shape,
    fake_value,
    int_argument,
    ints_argument,
    node_argument,
    nodes_argument,
)

_aten = torch.ops.aten
_VIEWS = frozenset({_aten.view.default, _aten._unsafe_view.default})
_REDUCTIONS = frozenset(
    {_aten.sum.dim_IntList, _aten.mean.dim, _aten.amax.default, _aten.amin.default, _aten.any.dim}
)
# Operands that have at most this share of the result's entries are turned without counting.
SMALL = 8


def move_transpositions(module: fx.GraphModule) -> None:
    """Rewrite ``module`` in place. Afterwards every value counts as contiguous, as in ExecuTorch, and views are reshapes."""
    graph = module.graph
    _drop_clones(graph)
    for node in list(graph.nodes):
        if node.op == "call_function" and not node._erased:
            _visit(graph, node)
    for node in graph.nodes:
        if node.target in _VIEWS:
            node.target = _aten.reshape.default
    graph.eliminate_dead_code()


def _drop_clones(graph: fx.Graph) -> None:
    outputs = set(graph.output_node().args[0])  # type: ignore[arg-type]
    for node in list(graph.nodes):
        if node.target is _aten.clone.default and node not in outputs:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def _visit(graph: fx.Graph, node: fx.Node) -> None:
    if node.target is _aten.permute.default:
        _merge(graph, node)
        return
    rewrite = _rewrite_of(node)
    if rewrite is None or not isinstance(node.meta["val"], Tensor):
        return
    with graph.inserting_before(node):
        new = rewrite(graph, node)
    if new is not None:
        node.replace_all_uses_with(new)
        graph.erase_node(node)


def _rewrite_of(node: fx.Node) -> Callable[[fx.Graph, fx.Node], fx.Node | None] | None:
    target = node.target
    if target in _REDUCTIONS:
        return _reduction
    if target is _aten.cat.default:
        return _cat
    if target in (_aten.slice.Tensor, _aten.constant_pad_nd.default):
        return _slice if target is _aten.slice.Tensor else _pad
    pointwise = torch.Tag.pointwise in getattr(target, "tags", ())
    return _pointwise if pointwise else None


def _merge(graph: fx.Graph, node: fx.Node) -> None:
    """Merge a transposition of a transposition; replace one that moves only axes of length one by a view."""
    source, dims = node.args[0], _order(node)
    if (before := _turned(source)) is not None:
        source, dims = before[0], [before[1][dim] for dim in dims]
        node.args = (source, dims)
    shape = source.meta["val"].shape  # type: ignore[union-attr]
    moved = [dim for dim in dims if shape[dim] != 1]
    if dims == list(range(len(dims))) and graph.output_node() in node.users:
        node.target, node.args = _aten.clone.default, (source,)  # an output is nothing else than that
    elif dims == list(range(len(dims))):
        node.replace_all_uses_with(source)  # type: ignore[arg-type]
        graph.erase_node(node)
    elif moved == sorted(moved):
        node.target, node.args = _aten.view.default, (source, list(node.meta["val"].shape))


def _order(node: fx.Node) -> list[int]:
    rank = node.meta["val"].dim()
    return [dim % rank for dim in ints_argument(node, 1)]


def _turned(value: object) -> tuple[fx.Node, list[int]] | None:
    """Return the operand of a transposition and its order of axes; None for any other value."""
    if isinstance(value, fx.Node) and value.target is _aten.permute.default:
        return value.args[0], _order(value)  # type: ignore[return-value]
    return None


def _call(graph: fx.Graph, target: Callable[..., object], args: tuple, kwargs: dict | None = None) -> fx.Node:  # type: ignore[type-arg]
    """Append a call and return its node with a fake result, contiguous as all values are."""
    node = graph.call_function(target, args, kwargs or {})
    fake = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    if target is _aten.view.default:
        target = _aten.reshape.default
    value = target(*fake[0], **fake[1])
    assert isinstance(value, Tensor)
    node.meta["val"] = value.contiguous()
    return node


def _channels_first(value: object) -> tuple[fx.Node, list[int]] | None:
    """Return :func:`_turned` if channels move from last to second, as the rules turn their results back; else None."""
    form = _turned(value)
    if form is None or len(form[1]) < 3 or form[1] != [0, len(form[1]) - 1, *range(1, len(form[1]) - 1)]:
        return None
    return form


def _back(graph: fx.Graph, node: fx.Node, dims: Sequence[int]) -> fx.Node:
    return _call(graph, _aten.permute.default, (node, list(dims)))


def _pointwise(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """Rewrite op(turned a, turned b, small) to turned op(a, b, turned small)."""
    _broadcast(node)
    operands = [arg for arg in node.all_input_nodes if isinstance(arg.meta["val"], Tensor)]
    result = node.meta["val"]
    turned = [(arg, form) for arg in operands if (form := _channels_first(arg)) is not None]
    whole = [arg for arg in operands if arg.meta["val"].numel() * SMALL > result.numel()]
    if not turned:
        return None
    dims = turned[0][1][1]
    same = [arg for arg, form in turned if form[1] == dims and arg.meta["val"].shape == result.shape]
    if len(dims) != result.dim() or not same or 2 * len(same) <= len(whole):
        return None
    inverse = sorted(range(len(dims)), key=dims.__getitem__)
    sources = {
        arg: _turned(arg)[0] if arg in same else _turn(graph, arg, inverse)  # type: ignore[index]
        for arg in operands
    }
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), sources.__getitem__)
    return _back(graph, _call(graph, node.target, args, kwargs), dims)  # type: ignore[arg-type]


def _broadcast(node: fx.Node) -> None:
    """Read expanded values as they were before, because the op itself broadcasts."""
    for arg in node.all_input_nodes:
        if arg.target is not _aten.expand.default:
            continue
        before = node_argument(arg, 0)
        others = [fake_value(read) for read in node.all_input_nodes if read is not arg]
        if broadcast_shape(fake_value(before), *others) == fake_value(node).shape:
            node.replace_input_with(arg, before)


def _turn(graph: fx.Graph, arg: fx.Node, dims: list[int]) -> fx.Node:
    """Return an operand that broadcasts, with the axes of ``dims`` in their order."""
    shape = list(arg.meta["val"].shape)
    if len(shape) == 0:
        return arg
    full = [1] * (len(dims) - len(shape)) + shape
    if sum(size > 1 for size in full) <= 1:
        return _call(graph, _aten.view.default, (arg, [full[dim] for dim in dims]))
    if len(full) > len(shape):
        arg = _call(graph, _aten.view.default, (arg, full))
    return _back(graph, arg, dims)


def _reduction(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    if (form := _channels_first(node.args[0])) is None or len(node.args) < 2 or node.args[1] is None:
        return None
    source, dims = form
    named = node.args[1] if isinstance(node.args[1], (list, tuple)) else [node.args[1]]
    axes = [axis % len(dims) for axis in cast(Sequence[int], named)] or list(range(len(dims)))
    keep = len(node.args) > 2 and bool(node.args[2])
    source_axes = [dims[axis] for axis in axes]
    first = source_axes if isinstance(node.args[1], (list, tuple)) else source_axes[0]
    new = _call(graph, node.target, (source, first, *node.args[2:]), dict(node.kwargs))  # type: ignore[arg-type]
    if keep:
        return _back(graph, new, dims)
    left = [dim for axis, dim in enumerate(dims) if axis not in axes]
    order = [sorted(left).index(dim) for dim in left]
    return new if order == sorted(order) else _back(graph, new, order)


def _cat(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    parts = [_channels_first(part) for part in nodes_argument(node, 0)]
    if parts[0] is None or any(part is None or part[1] != parts[0][1] for part in parts):
        return None
    dims = parts[0][1]
    axis = int(int_argument(node, 1)) if len(node.args) > 1 else 0
    new = _call(graph, node.target, ([part[0] for part in parts if part], dims[axis % len(dims)]))  # type: ignore[arg-type]
    return _back(graph, new, dims)


def _slice(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    if (form := _channels_first(node.args[0])) is None:
        return None
    source, dims = form
    axis = int(int_argument(node, 1)) if len(node.args) > 1 else 0
    new = _call(graph, node.target, (source, dims[axis % len(dims)], *node.args[2:]))  # type: ignore[arg-type]
    return _back(graph, new, dims)


def _pad(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    if (form := _channels_first(node.args[0])) is None:
        return None
    source, dims = form
    pads = list(ints_argument(node, 1))
    moved = [0, 0] * len(dims)
    for index in range(len(pads) // 2):
        place = 2 * (len(dims) - 1 - dims[len(dims) - 1 - index])
        moved[place : place + 2] = pads[2 * index : 2 * index + 2]
    new = _call(graph, node.target, (source, moved, *node.args[2:]))  # type: ignore[arg-type]
    return _back(graph, new, dims)
