"""Early storing of values that wait for the backward pass in half precision (:mod:`edgefl.algorithms.activations`).

onnxruntime computes values in the order in which they are needed. Only the backward pass needs a waiting value, so it would
be stored then, and have waited in full precision. Therefore all other readers read the value behind the store
(:mod:`edgefl_export.ordering`). A store that both passes read is restored twice, once for each. So are masks of floats,
which wait as booleans: a byte for each entry.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise

import torch
from torch import Tensor, fx

from edgefl_export.capture.nodes import fake_value, node_argument
from edgefl_export.ordering import AFTER, POSITIVE

WAITING = 0.03
"""A value waits if no node reads it for this share of the nodes."""

_TO_COPY = torch.ops.aten._to_copy.default


def stores(graph: fx.Graph) -> list[fx.Node]:
    """Return the nodes that make the half of a value, which waits for the backward pass."""
    halves = [node for node in graph.nodes if _converts(node, torch.float16)]
    made = [node for node in halves if node_argument(node, 0).op == "call_function"]
    return [node for node in made if any(map(_restores, node.users))]


def store_early(module: fx.GraphModule) -> None:
    """Rewrite ``module`` in place: each store comes right behind its value, whatever order a runtime chooses."""
    graph = module.graph
    found = stores(graph)
    if not found:
        return
    position = {node: place for place, node in enumerate(graph.nodes)}
    for node in list(position):
        if _restores(node) or _is_mask(node):
            _restored_again(graph, node, position)
    for store in found:
        _moved_up(graph, store, position)


def _converts(node: fx.Node, dtype: torch.dtype) -> bool:
    return node.target is _TO_COPY and fake_value(node).dtype is dtype


def _restores(node: fx.Node) -> bool:
    return _converts(node, torch.float32) and fake_value(node.args[0]).dtype is torch.float16


def _is_mask(node: fx.Node) -> bool:
    return _converts(node, torch.float32) and fake_value(node.args[0]).dtype is torch.bool


def _moved_up(graph: fx.Graph, store: fx.Node, position: Mapping[fx.Node, int]) -> None:
    value = node_argument(store, 0)
    others = [user for user in value.users if user is not store and user.op == "call_function"]
    value.append(store)
    with graph.inserting_after(store):
        behind = _after(graph, value, store)
    for user in others:
        if position[user] > position[value]:
            user.replace_input_with(value, behind)


def _restored_again(graph: fx.Graph, restored: fx.Node, position: Mapping[fx.Node, int]) -> None:
    late = _late(restored, position)
    if not late:
        return
    with graph.inserting_before(late[0]):
        kept = node_argument(restored, 0)
        held = _after(graph, kept, _before(late[0]))
        again = graph.node_copy(restored, _in_place_of(kept, held))
    for user in late:
        user.replace_input_with(restored, again)


def _in_place_of(old: fx.Node, new: fx.Node) -> Callable[[fx.Node], fx.Node]:
    return lambda node: new if node is old else node


def _late(node: fx.Node, position: Mapping[fx.Node, int]) -> list[fx.Node]:
    """Return the readers of ``node`` behind the longest stretch without a reader; none if it does not wait."""
    readers = sorted((user for user in node.users if user in position), key=position.__getitem__)
    places = [position[node], *(position[user] for user in readers)]
    gaps = [later - earlier for earlier, later in pairwise(places)]
    if max(gaps, default=0) <= WAITING * len(position):
        return []
    first = gaps.index(max(gaps))
    return readers[first:] if first else []


def _before(node: fx.Node) -> fx.Node:
    """Return the last number computed before ``node``: once it exists, ``node`` may run."""
    while True:
        node = node.prev
        value = node.meta.get("val")
        floats = isinstance(value, Tensor) and value.dtype is torch.float32 and value.numel() > 0
        if node.op != "call_function" or (floats and node.target not in (_TO_COPY, AFTER, POSITIVE)):
            return node


def _after(graph: fx.Graph, node: fx.Node, trigger: fx.Node) -> fx.Node:
    call = graph.call_function(AFTER, (node, trigger))
    call.meta["val"] = node.meta["val"]
    return call
