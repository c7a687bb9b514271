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
    """Return a positional argument that is a tensor."""
    return cast(fx.Node, node.args[place])


def nodes_argument(node: fx.Node, place: int) -> Sequence[fx.Node]:
    """Return a positional argument that is a list of tensors."""
    return cast(Sequence[fx.Node], node.args[place])


def int_argument(node: fx.Node, place: int) -> int:
    """Return a positional argument that is a whole number."""
    return cast(int, node.args[place])


def ints_argument(node: fx.Node, place: int) -> Sequence[int]:
    """Return a positional argument that is a list of whole numbers."""
    return cast(Sequence[int], node.args[place])


def argument(node: fx.Node, name: str) -> Any:
    """Return an argument by its name in the schema, or its default; KeyError if the op has none of that name."""
    for index, item in enumerate(schema_arguments(node)):
        if item.name == name:
            return node.args[index] if index < len(node.args) else node.kwargs.get(name, item.default_value)
    raise KeyError(name)


def schema_arguments(node: fx.Node) -> list[Any]:
    """Return the arguments in the schema of a node's op. The node must be one of an op."""
    return list(cast(Any, node.target)._schema.arguments)


def results(graph: fx.Graph) -> tuple[fx.Node, ...]:
    """Return the nodes that a graph returns, in order."""
    return tuple(nodes_argument(graph.output_node(), 0))


def read_inputs(graph: fx.Graph, names: Iterable[str]) -> tuple[str, ...]:
    """Return the names of the inputs that are read, and erase the placeholders of the others."""
    inputs = list(zip(names, graph.find_nodes(op="placeholder"), strict=True))
    for _, node in inputs:
        if not node.users:
            graph.erase_node(node)
    return tuple(name for name, node in inputs if node.users)


def copy_of(graph: fx.Graph) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """Return a copy of ``graph`` that may be changed, and its node for each node of ``graph``."""
    copy, mapping = fx.Graph(), dict[fx.Node, fx.Node]()
    copy.output(copy.graph_copy(graph, mapping))
    copy.output_node().args = (tuple(mapping[node] for node in results(graph)),)
    return copy, mapping


def broadcast_shape(*values: Tensor) -> tuple[int, ...]:
    """Return the shape of a result that is computed entry by entry from these tensors."""
    return tuple(torch.broadcast_shapes(*(value.shape for value in values)))


def call(graph: fx.Graph, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """Insert a call of ``target`` and return its node with a fake result."""
    node = graph.call_function(target, args, kwargs)
    values, options = fx.node.map_arg((args, kwargs), lambda read: read.meta["val"])
    node.meta["val"] = target(*values, **options)
    return node


def held_back(graph: fx.Graph, node: fx.Node, trigger: fx.Node | None) -> fx.Node:
    """Insert ``node``, but not before ``trigger`` has been computed (:data:`edgefl_export.operators.AFTER`)."""
    late = graph.call_function(AFTER, (node, trigger))
    late.meta["val"] = node.meta["val"]
    return late
