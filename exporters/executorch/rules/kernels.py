"""Ops for which ExecuTorch has no kernel, in ops for which it has one. Each form gets the graph, at the place of the
node, and the node; it returns what replaces the node, or None to leave it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

_aten = torch.ops.aten
Form = Callable[[fx.Graph, fx.Node], fx.Node | None]


def call(graph: fx.Graph, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """A node with its fake value."""
    node = graph.call_function(target, args, kwargs)
    values = fx.node.map_arg((args, kwargs), lambda read: read.meta["val"])
    node.meta["val"] = target(*values[0], **values[1])
    return node


def _sum(graph: fx.Graph, node: fx.Node) -> fx.Node:
    return call(graph, _aten.sum.dim_IntList, node.args[0], [], False, **node.kwargs)


FORMS: dict[Any, Form] = {
    _aten.sum.default: _sum,
}
