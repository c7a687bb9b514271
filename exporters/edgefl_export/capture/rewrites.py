"""Rewrites of captured graphs: cheaper gradients, early storing of halves, merge of equal nodes."""

from __future__ import annotations

import operator
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx

from edgefl_export.capture.nodes import argument, delay, fake_value, node_argument
from edgefl_export.decompositions.normalization import GRADIENT
from edgefl_export.operators import AFTER, POSITIVE

# Cheaper forms of gradients, while a graph is forward, backward and update in torch's own ops.

_aten = torch.ops.aten


def rewrite_gradients(joint: fx.GraphModule, table: Collection[object]) -> None:
    """Rewrite the gradients of max pooling and batch norm in ``joint``, in place, into cheaper forms.

    Results are equal but for rounding.

    Args:
        joint: graph of forward, backward and update in torch's ops.
        table: ops with a decomposition. The gradient of batch norm is rewritten only if our form of it is among them.
    """
    for node in list(joint.graph.nodes):
        if node.target is _aten.max_pool2d_with_indices_backward.default:
            _pass_pooled_input(node)
        elif node.target is _aten.native_batch_norm_backward.default and GRADIENT in table:
            _move_gain_to_kernel(joint.graph, node)
    joint.recompile()


def _pass_pooled_input(node: fx.Node) -> None:
    """Make the gradient of a max pooling read the tensor that was pooled, in place.

    torch reads only the shape of that argument, and if a gradient is differentiated it passes a tangent there. A rule that
    finds the maxima again, without their positions, must read the tensor itself.
    """
    positions = argument(node, "indices")
    pooling = positions.args[0] if positions.target is operator.getitem else positions
    if pooling.target is _aten.max_pool2d_with_indices.default:
        node.update_arg(1, pooling.args[0])


def _move_gain_to_kernel(graph: fx.Graph, node: fx.Node) -> None:
    """Move the gain of a norm into the kernel w of the convolution before it, if w has fewer entries than the images.

    The norm returns the gradient gain h for the output of the convolution. The rewritten graph passes h instead:
    dL/dx = gain h * w = h * (gain w);  dL/dw = gain dL/dw of h;  dL/db = gain dL/db of h.
    """
    gradients = list(_parts(node, 0))
    if len(gradients) != 1 or len(gradients[0].users) != 1:
        return
    (reader,) = gradients[0].users
    if reader.target is not _aten.convolution_backward.default or reader.args[0] is not gradients[0]:
        return
    kernel = argument(reader, "weight")
    if argument(reader, "transposed") or 2 * fake_value(kernel).numel() > fake_value(gradients[0]).numel():
        return
    with graph.inserting_before(node):
        parts = graph.call_function(GRADIENT, (*node.args[:9],))
        before, gain, slope, level = (graph.call_function(operator.getitem, (parts, at)) for at in range(4))
        scale = graph.call_function(_aten.view.default, (gain, [-1, *[1] * (fake_value(kernel).dim() - 1)]))
    with graph.inserting_before(reader):
        scaled = graph.call_function(_aten.mul.Tensor, (kernel, scale))
    reader.update_arg(2, scaled)
    for at, factor in ((1, scale), (2, gain)):
        for each in list(_parts(reader, at)):
            users = list(each.users)
            if users:  # unused gradients are not computed
                with graph.inserting_after(each):
                    product = graph.call_function(_aten.mul.Tensor, (each, factor))
                for user in users:
                    user.replace_input_with(each, product)
    for at, part in ((0, before), (1, slope), (2, level)):
        for each in list(_parts(node, at)):
            each.replace_all_uses_with(part)
            graph.erase_node(each)
    graph.erase_node(node)


def _parts(node: fx.Node, at: int) -> Iterator[fx.Node]:
    """Yield the ``getitem`` nodes that read result number ``at`` of ``node``."""
    return (user for user in node.users if user.target is operator.getitem and user.args[1] == at)


# Early storing of values that wait for the backward pass in half precision (:mod:`edgefl.algorithms.activations`).
#
# onnxruntime computes values in the order in which they are needed. Only the backward pass needs a waiting value, so it
# would be stored then, and have waited in full precision. Therefore all other readers read the value behind the store
# (:mod:`edgefl_export.operators`). A store that both passes read is restored twice, once for each. So are masks of floats,
# which wait as booleans: a byte for each entry.

WAITING = 0.03
"""A value waits if no node reads it for this share of the nodes."""

_TO_COPY = torch.ops.aten._to_copy.default


def half_stores(graph: fx.Graph) -> list[fx.Node]:
    """Return the nodes that convert a computed value to float16 and are converted back to float32 later."""
    halves = [node for node in graph.nodes if _converts(node, torch.float16)]
    made = [node for node in halves if node_argument(node, 0).op == "call_function"]
    return [node for node in made if any(map(_restores, node.users))]


def store_early(module: fx.GraphModule) -> None:
    """Rewrite ``module`` in place so that a runtime converts each value to float16 right after it is computed.

    All other readers of the value depend on the conversion, so no order of execution keeps the float32 value longer.
    """
    graph = module.graph
    found = half_stores(graph)
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
        behind = delay(graph, value, store)
    for user in others:
        if position[user] > position[value]:
            user.replace_input_with(value, behind)


def _restored_again(graph: fx.Graph, restored: fx.Node, position: Mapping[fx.Node, int]) -> None:
    late = _readers_after_gap(restored, position)
    if not late:
        return
    with graph.inserting_before(late[0]):
        kept = node_argument(restored, 0)
        held = delay(graph, kept, _last_float_before(late[0]))
        again = graph.node_copy(restored, lambda node: held if node is kept else node)
    for user in late:
        user.replace_input_with(restored, again)


def _readers_after_gap(node: fx.Node, position: Mapping[fx.Node, int]) -> list[fx.Node]:
    """Return the readers of ``node`` after the longest gap between two of them, or [] if no gap is long enough to
    matter.

    ``position`` is the position of each node in the graph.
    """
    readers = sorted((user for user in node.users if user in position), key=position.__getitem__)
    places = [position[node], *(position[user] for user in readers)]
    gaps = [later - earlier for earlier, later in pairwise(places)]
    if max(gaps, default=0) <= WAITING * len(position):
        return []
    first = gaps.index(max(gaps))
    return readers[first:] if first else []


def _last_float_before(node: fx.Node) -> fx.Node:
    """Return the last float32 value that is computed before ``node``, to make ``node`` wait for it."""
    while True:
        node = node.prev
        value = node.meta.get("val")
        floats = isinstance(value, Tensor) and value.dtype is torch.float32 and value.numel() > 0
        if node.op != "call_function" or (floats and node.target not in (_TO_COPY, AFTER, POSITIVE)):
            return node


# Merge of equal nodes of a captured graph.
#
# onnxruntime merges them when it loads a graph. Here it happens first, so that recomputation and predictions of memory
# (:mod:`edgefl_export.memory`) see how long each value waits.

_SLICE = torch.ops.aten.slice.Tensor


def merge_equal(module: fx.GraphModule) -> None:
    """Merge nodes of equal op and arguments in ``module``, in place.

    Random ops and ops that write into an argument stay. Slices stay, too, because the export joins a slice with the only
    slice that reads it.
    """
    nodes = module.graph.nodes
    merge_nodes(
        module.graph,
        [n for n in nodes if n.op == "call_function" and n.target is not _SLICE and _is_pure(n.target)],
    )


def merge_nodes(graph: fx.Graph, nodes: Iterable[fx.Node]) -> None:
    """Replace each of ``nodes``, in graph order, by the first one with the same op and arguments, and erase it."""
    first: dict[Hashable, fx.Node] = {}
    for node in nodes:
        same = first.setdefault((node.target, _key(node.args), _key(node.kwargs)), node)
        if same is not node:
            node.replace_all_uses_with(same)
            graph.erase_node(node)


def _is_pure(target: Any) -> bool:
    """Return True if calls of ``target`` with equal arguments have equal results and write into no argument."""
    if not isinstance(target, torch._ops.OpOverload):
        return target is operator.getitem
    return torch.Tag.nondeterministic_seeded not in target.tags and not target._schema.is_mutable


def _key(item: Any) -> Hashable:
    """Return a hashable key of an argument. The keys of 1, 1.0 and True differ, and those of 0.0 and -0.0."""
    if isinstance(item, tuple | list):
        return tuple(map(_key, item))
    if isinstance(item, dict):
        return tuple((name, _key(value)) for name, value in item.items())
    return item if isinstance(item, fx.Node) else (type(item), repr(item))
