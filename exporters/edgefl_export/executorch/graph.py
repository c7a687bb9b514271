"""Graph in the form of ExecuTorch: without copies, with constants folded, in ops that have a kernel."""

from __future__ import annotations

import operator

import torch
from torch import Tensor, fx

from edgefl_export.capture.graph import LoweredGraph
from edgefl_export.capture.nodes import call, copy_of, fake_value, ints_argument, node_argument, results
from edgefl_export.capture.rewrites import merge_nodes
from edgefl_export.memory.usage import is_pointwise
from edgefl_export.operators import AFTER, named

_aten = torch.ops.aten


SAME = frozenset(
    {
        _aten.alias.default,
        _aten.clone.default,
        _aten.detach.default,
        _aten.lift_fresh_copy.default,
        AFTER,
    }
)
"""Ops whose result is their first argument; every value is contiguous here."""

VIEWS = named("view _unsafe_view reshape unsqueeze squeeze.dim squeeze.dims squeeze")
"""Ops whose result has the bytes of their first argument in the same order: another name for the same memory."""

_PERHAPS_NOTHING = (
    _aten.expand.default,
    _aten._to_copy.default,
    _aten.slice.Tensor,
    _aten.constant_pad_nd.default,
)


def base_of(node: fx.Node) -> fx.Node:
    """Return the source of a view, behind any number of views; any other node itself."""
    while node.op == "call_function" and node.target in VIEWS:
        node = node_argument(node, 0)
    return node


def is_name(node: fx.Node) -> bool:
    """Return True if a node computes nothing: a view, or one result of a node with several."""
    return node.op == "call_function" and (node.target in VIEWS or node.target is operator.getitem)


FOLDED_BYTES = 1 << 16
"""A value made of constants alone is computed at export if it has at most so many bytes."""


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
    """Return True for a view, expansion, slice, padding or conversion that changes nothing."""
    if node.target not in VIEWS and node.target not in _PERHAPS_NOTHING:
        return False
    if not isinstance(node.args[0], fx.Node):  # a number
        return False
    if node.target is _aten.constant_pad_nd.default and any(ints_argument(node, 1)):
        return False
    before, after = fake_value(node.args[0]), fake_value(node)
    return before.shape == after.shape and before.dtype == after.dtype


def _name_axes(graph: fx.Graph) -> None:
    """Name the axes of sums over all axes, because ExecuTorch has no kernel for the other form."""
    for node in graph.find_nodes(op="call_function", target=_aten.sum.default):
        with graph.inserting_before(node):
            new = call(graph, _aten.sum.dim_IntList, node.args[0], [], False, **node.kwargs)
        node.replace_all_uses_with(new)
        graph.erase_node(node)


def _merge_views(graph: fx.Graph) -> None:
    """Make a view of a view a view of the first. A view that is an output becomes a copy: outputs own their memory."""
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
    """Compute what depends on constants alone."""
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
