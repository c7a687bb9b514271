"""Graph in the form of ExecuTorch: without copies, with constants folded, in ops that have a kernel."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx

from edgefl_export.capture.graph import LoweredGraph
from edgefl_export.capture.nodes import (
    broadcast_shape,
    call,
    copy_of,
    fake_value,
    int_argument,
    ints_argument,
    node_argument,
    nodes_argument,
    results,
)
from edgefl_export.capture.rewrites import merge_nodes
from edgefl_export.memory.usage import is_pointwise
from edgefl_export.operators import AFTER, aten_ops

_aten = torch.ops.aten


SAME = aten_ops("alias clone detach lift_fresh_copy") | {AFTER}
"""Ops whose result is their first argument; every value is contiguous here."""

VIEWS = aten_ops("view _unsafe_view reshape unsqueeze squeeze.dim squeeze.dims squeeze")
"""Ops whose result has the bytes of their first argument in the same order: another name for the same memory."""

_PERHAPS_NOTHING = aten_ops("expand _to_copy slice.Tensor constant_pad_nd")


def base_of(node: fx.Node) -> fx.Node:
    """Return the node whose memory a view, or a chain of views, refers to; any other node itself."""
    while node.op == "call_function" and node.target in VIEWS:
        node = node_argument(node, 0)
    return node


def is_name(node: fx.Node) -> bool:
    """Return True if a node computes nothing and only names memory: a view, or a ``getitem`` of an op with several
    results.
    """
    return node.op == "call_function" and (node.target in VIEWS or node.target is operator.getitem)


FOLDED_BYTES = 1 << 16
"""Largest size in bytes of a value that depends on constants alone and is computed at export."""


def to_kernel_ops(lowered: LoweredGraph) -> fx.GraphModule:
    """Return a copy of the lowered graph in ops that have kernels; every node has its fake value in ``meta["val"]``."""
    graph, _ = copy_of(lowered.module.graph)
    module = fx.GraphModule(lowered.module, graph)
    # Merged arithmetic lets the backward pass read results of the forward pass. Not merged are movements, of which there are
    # many, what waits for something (AFTER), and outputs, which have memory of their own.
    outputs = set(results(graph))
    merge_nodes(
        graph,
        [
            node
            for node in graph.nodes
            if node.op == "call_function" and node not in outputs and is_pointwise(node)
        ],
    )
    _drop_copies(module.graph)
    _name_axes(module.graph)
    _fold(module)
    _drop_copies(module.graph)
    _merge_views(module.graph)
    module.graph.eliminate_dead_code()
    return module


def _drop_copies(graph: fx.Graph) -> None:
    outputs = set(results(graph))
    for node in list(graph.nodes):
        if node.op != "call_function" or not (node.target in SAME or _is_nothing(node)):
            continue
        source = node_argument(node, 0)
        if node in outputs and (source in outputs or source.op != "call_function"):
            continue  # an output has memory of its own
        if node in outputs and any(user.target is operator.getitem for user in source.users):
            continue
        if node in outputs:
            outputs.add(source)
        node.replace_all_uses_with(source)
        graph.erase_node(node)


def _is_nothing(node: fx.Node) -> bool:
    """Return True if ``node`` is a view, expansion, slice, padding or conversion whose result equals its argument."""
    if node.target not in VIEWS and node.target not in _PERHAPS_NOTHING:
        return False
    if not isinstance(node.args[0], fx.Node):  # a number
        return False
    if node.target is _aten.constant_pad_nd.default and any(ints_argument(node, 1)):
        return False
    before, after = fake_value(node.args[0]), fake_value(node)
    return before.shape == after.shape and before.dtype == after.dtype


def _name_axes(graph: fx.Graph) -> None:
    """Replace sums without an axis argument by equal sums with an empty list of axes, in place, because ExecuTorch has
    no kernel for sums without the argument.
    """
    for node in graph.find_nodes(op="call_function", target=_aten.sum.default):
        with graph.inserting_before(node):
            new = call(graph, _aten.sum.dim_IntList, node.args[0], [], False, **node.kwargs)
        node.replace_all_uses_with(new)
        graph.erase_node(node)


def _merge_views(graph: fx.Graph) -> None:
    """Make each view read the node behind its chain of views, in place. A view that is an output becomes a copy:
    outputs own their memory.
    """
    outputs = set(results(graph))
    for node in graph.nodes:
        if node.op == "call_function" and node.target in VIEWS:
            source = node.args[0]
            while source.op == "call_function" and source.target in VIEWS:
                source = source.args[0]
            node.target = _aten.view_copy.default if node in outputs else _aten.view.default
            node.args = (source, list(node.meta["val"].shape))
            node.kwargs = {}


def _fold(module: fx.GraphModule) -> None:
    """Replace small values that depend on constants alone by constants, in place."""
    values: dict[fx.Node, Tensor] = {}
    outputs = set(results(module.graph))
    for node in list(module.graph.nodes):
        if node.op == "get_attr":
            values[node] = getattr(module, node.target)
        if node.op != "call_function" or not isinstance(node.meta["val"], Tensor):
            continue
        value = node.meta["val"]
        known = all(read in values for read in node.all_input_nodes)
        if not known or node in outputs or value.numel() * value.itemsize > FOLDED_BYTES:
            continue
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
        name = f"folded_{len(values)}"
        values_here = node.target(*args, **kwargs).contiguous().clone()
        module.register_buffer(name, values_here)
        with module.graph.inserting_before(node):
            new = module.graph.get_attr(name)
        new.meta["val"] = value
        values[new] = values_here
        node.replace_all_uses_with(new)
        module.graph.erase_node(node)


# Transpositions moved down the graph until they meet their inverse.
#
# The rules for convolutions, pooling and batch normalization work channels last and turn their results back. Between two of
# them is a transposition and its inverse, with activations, sums and joins in between. A transposition before such an op can
# also come after it; two that meet become one or none. The remaining ones move data: at the edges of the graph, and where a
# product needs its left factor transposed.

_TRACED_VIEWS = frozenset({_aten.view.default, _aten._unsafe_view.default})
_REDUCTIONS = aten_ops("sum.dim_IntList mean.dim amax amin any.dim")
# Operands that have at most this share of the result's entries are turned without counting.
SMALL = 8


def move_transpositions(module: fx.GraphModule) -> None:
    """Move transpositions down the graph, in place, until they meet their inverse or cannot be moved.

    Afterwards all values count as contiguous, as in ExecuTorch, and views are reshapes.
    """
    graph = module.graph
    _drop_clones(graph)
    for node in list(graph.nodes):
        if node.op == "call_function" and not node._erased:
            _visit(graph, node)
    for node in graph.nodes:
        if node.target in _TRACED_VIEWS:
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
        _merge_transposition(graph, node)
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


def _merge_transposition(graph: fx.Graph, node: fx.Node) -> None:
    """Merge a transposition with one that it reads; replace it by a view if it moves only axes of length one."""
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
    """Return (operand, order of axes) of a transposition, or None for any other value."""
    if isinstance(value, fx.Node) and value.target is _aten.permute.default:
        return value.args[0], _order(value)  # type: ignore[return-value]
    return None


def _call(graph: fx.Graph, target: Any, args: Any, kwargs: Any = None) -> fx.Node:
    """Insert a call and return its node, with a contiguous fake result as value."""
    node = graph.call_function(target, args, kwargs or {})
    fake = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    if target is _aten.view.default:
        target = _aten.reshape.default
    value = target(*fake[0], **fake[1])
    assert isinstance(value, Tensor)
    node.meta["val"] = value.contiguous()
    return node


def _channels_first(value: object) -> tuple[fx.Node, list[int]] | None:
    """Return (operand, order of axes) if ``value`` is a transposition that moves channels from last to second, else None."""
    form = _turned(value)
    if form is None or len(form[1]) < 3 or form[1] != [0, len(form[1]) - 1, *range(1, len(form[1]) - 1)]:
        return None
    return form


def _back(graph: fx.Graph, node: fx.Node, dims: Sequence[int]) -> fx.Node:
    return _call(graph, _aten.permute.default, (node, list(dims)))


def _pointwise(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """Rewrite op(transposed a, transposed b, small c) to a transposition of op(a, b, inversely transposed c).

    Return the new node, or None if that would not save transpositions.
    """
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
    return _back(graph, _call(graph, node.target, args, kwargs), dims)


def _broadcast(node: fx.Node) -> None:
    """Make an element-wise ``node`` read the operands of expansions instead of their results, because the op itself
    broadcasts.
    """
    for arg in node.all_input_nodes:
        if arg.target is not _aten.expand.default:
            continue
        before = node_argument(arg, 0)
        others = [fake_value(read) for read in node.all_input_nodes if read is not arg]
        if broadcast_shape(fake_value(before), *others) == fake_value(node).shape:
            node.replace_input_with(arg, before)


def _turn(graph: fx.Graph, arg: fx.Node, dims: list[int]) -> fx.Node:
    """Insert a transposition of ``arg``, which may have fewer axes than ``dims``, to the order ``dims``."""
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
    new = _call(graph, node.target, (source, first, *node.args[2:]), dict(node.kwargs))
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
    new = _call(graph, node.target, ([part[0] for part in parts if part], dims[axis % len(dims)]))
    return _back(graph, new, dims)


def _slice(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    if (form := _channels_first(node.args[0])) is None:
        return None
    source, dims = form
    axis = int(int_argument(node, 1)) if len(node.args) > 1 else 0
    new = _call(graph, node.target, (source, dims[axis % len(dims)], *node.args[2:]))
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
    new = _call(graph, node.target, (source, moved, *node.args[2:]))
    return _back(graph, new, dims)
