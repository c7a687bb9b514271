"""Typed access to nodes of a graph: torch.fx has one type for all arguments, and none for ``meta``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx

from edgefl_export.operators import AFTER

PORT = "port"
"""In ``meta`` of a placeholder: the name of its port."""


def fake_value(argument: object) -> Tensor:
    """Return the fake result of a node with one result: its shape, dtype and strides."""
    return cast(Tensor, cast(fx.Node, argument).meta["val"])


def node_argument(node: fx.Node, place: int) -> fx.Node:
    """Return positional argument ``place`` of ``node``, which is a node of a tensor."""
    return cast(fx.Node, node.args[place])


def nodes_argument(node: fx.Node, place: int) -> Sequence[fx.Node]:
    """Return positional argument ``place`` of ``node``, which is a list of nodes."""
    return cast(Sequence[fx.Node], node.args[place])


def int_argument(node: fx.Node, place: int) -> int:
    """Return positional argument ``place`` of ``node``, which is an integer."""
    return cast(int, node.args[place])


def ints_argument(node: fx.Node, place: int) -> Sequence[int]:
    """Return positional argument ``place`` of ``node``, which is a list of integers."""
    return cast(Sequence[int], node.args[place])


def argument(node: fx.Node, name: str) -> Any:
    """Return the argument called ``name`` in the op's schema, or its default.

    Raise KeyError if the op has no such argument.
    """
    for index, item in enumerate(schema_arguments(node)):
        if item.name == name:
            return node.args[index] if index < len(node.args) else node.kwargs.get(name, item.default_value)
    raise KeyError(name)


def schema_arguments(node: fx.Node) -> list[Any]:
    """Return the schema's arguments (names, types, defaults) of the op that ``node`` calls."""
    return list(cast(Any, node.target)._schema.arguments)


def results(graph: fx.Graph) -> tuple[fx.Node, ...]:
    """Return the nodes whose values the graph returns, in order."""
    return tuple(nodes_argument(graph.output_node(), 0))


def read_inputs(graph: fx.Graph, names: Iterable[str]) -> tuple[str, ...]:
    """Erase the placeholders that no node reads, and return the names of the others in order.

    Args:
        graph: graph to change.
        names: names of all placeholders, in order.
    """
    inputs = list(zip(names, graph.find_nodes(op="placeholder"), strict=True))
    for _, node in inputs:
        if not node.users:
            graph.erase_node(node)
    return tuple(name for name, node in inputs if node.users)


def copy_of(graph: fx.Graph) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """Return (copy of ``graph``, dictionary from each node of ``graph`` to its copy)."""
    copy, mapping = fx.Graph(), dict[fx.Node, fx.Node]()
    copy.output(copy.graph_copy(graph, mapping))
    copy.output_node().args = (tuple(mapping[node] for node in results(graph)),)
    return copy, mapping


def broadcast_shape(*values: Tensor) -> tuple[int, ...]:
    """Return the shape of the result of an element-wise op on ``values``, after broadcasting."""
    return tuple(torch.broadcast_shapes(*(value.shape for value in values)))


def call(graph: fx.Graph, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """Insert a call of ``target`` at the insertion point of ``graph`` and return its node, with a fake result as value."""
    node = graph.call_function(target, args, kwargs)
    values, options = fx.node.map_arg((args, kwargs), lambda read: read.meta["val"])
    node.meta["val"] = target(*values, **options)
    return node


def delay(graph: fx.Graph, node: fx.Node, trigger: fx.Node | None) -> fx.Node:
    """Insert a node with the value of ``node`` and return it. Runtimes cannot compute it before ``trigger``, a node
    that it also reads.
    """
    late = graph.call_function(AFTER, (node, trigger))
    late.meta["val"] = node.meta["val"]
    return late
