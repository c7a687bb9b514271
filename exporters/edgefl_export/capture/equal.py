"""Merge of equal nodes of a captured graph.

onnxruntime merges them when it loads a graph. Here it happens first, so that recomputation and predictions of memory
(:mod:`edgefl_export.memory`) see how long each value waits.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable
from typing import Any

import torch
from torch import fx

_SLICE = torch.ops.aten.slice.Tensor


def merge_equal(module: fx.GraphModule) -> None:
    """Replace equal nodes by the first of them. Random ops and ops that write into an argument stay.

    Slices stay, too: the export joins a slice and the one slice that reads it.
    """
    graph = module.graph
    first: dict[Hashable, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target is _SLICE or not _is_pure(node.target):
            continue
        key = (node.target, _key(node.args), _key(node.kwargs))
        found = first.setdefault(key, node)
        if found is not node:
            node.replace_all_uses_with(found)
            graph.erase_node(node)


def _is_pure(target: Any) -> bool:
    """Return True if two calls with the same arguments return the same."""
    if not isinstance(target, torch._ops.OpOverload):
        return target is operator.getitem
    return torch.Tag.nondeterministic_seeded not in target.tags and not target._schema.is_mutable


def _key(item: Any) -> Hashable:
    """Return an argument as something that can be compared. 1, 1.0 and True are three arguments, and so are 0.0 and -0.0."""
    if isinstance(item, tuple | list):
        return tuple(map(_key, item))
    if isinstance(item, dict):
        return tuple((name, _key(value)) for name, value in item.items())
    return item if isinstance(item, fx.Node) else (type(item), repr(item))
