"""Bytes of tensors that a graph holds while each of its nodes runs, in the order of a runtime."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from edgefl.contract.tensors import role_of
from edgefl_export.capture.graph import LoweredGraph
from edgefl_export.capture.nodes import node_argument, results
from edgefl_export.operators import AFTER, aten_ops

_aten = torch.ops.aten

# Same memory, another shape.
_VIEWS = aten_ops("view _unsafe_view reshape unsqueeze squeeze.dim squeeze.dims") | {AFTER}

_SLICE = _aten.slice.Tensor
PRODUCTS = aten_ops("mm addmm bmm")
_MOVES = aten_ops("permute transpose.int t clone")
_FACTORS = aten_ops("mul.Tensor mul.Scalar div.Tensor div.Scalar")
_ARITHMETIC = _FACTORS | aten_ops("add.Tensor add.Scalar sub.Tensor sub.Scalar where.self")
# They read the shape of their first argument, which the file holds.
_SHAPED = aten_ops("full_like empty_like zeros_like ones_like new_zeros new_ones new_full new_empty")

SMALL_BYTES = 32 * 2**10
"""Size in bytes below which a value is never computed twice: it saves little memory, and may be a sum that took long."""


@dataclass(frozen=True)
class Timeline:
    """Nodes of a graph in the order of execution, with the memory that is held while each runs.

    Each result of an op with several results is owned by the ``getitem`` node that reads it.

    Attributes:
        nodes: nodes in order.
        position: index of each node in ``nodes``.
        owner: node that owns the memory of a node: the node itself, or the source of a view.
        reads: positions of the nodes that read the memory of a node, ascending.
        live: bytes held while node ``i`` runs; inputs are always held, outputs until the end.
    """

    nodes: tuple[fx.Node, ...]
    position: dict[fx.Node, int]
    owner: dict[fx.Node, fx.Node]
    reads: dict[fx.Node, list[int]]
    live: tuple[int, ...]

    @property
    def peak(self) -> int:
        return max(self.live)


def timeline(module: fx.GraphModule) -> Timeline:
    nodes = tuple(module.graph.nodes)
    position = {node: index for index, node in enumerate(nodes)}
    owner: dict[fx.Node, fx.Node] = {}
    reads: dict[fx.Node, list[int]] = {}
    for index, node in enumerate(nodes):
        owner[node] = owner[node_argument(node, 0)] if shares(node) else node
        reads[node] = []
        for value in node.all_input_nodes:
            reads[owner[value]].append(index)
    return Timeline(nodes, position, owner, reads, _live(nodes, owner, reads))


def constants(line: Timeline) -> frozenset[fx.Node]:
    """Return the nodes that depend on no input of the graph."""
    found: set[fx.Node] = set()
    for node in line.nodes:
        if node.op == "get_attr" or (node.op == "call_function" and found.issuperset(node.all_input_nodes)):
            found.add(node)
    return frozenset(found)


def shares(node: fx.Node) -> bool:
    """Return True if ``node`` shares the memory of its operand: a view, or a slice that only another slice reads (the
    export merges both).
    """
    if node.op != "call_function":
        return False
    merged = node.target is _SLICE and [user.target for user in node.users] == [_SLICE]
    return merged or node.target in _VIEWS


def has_many(node: fx.Node) -> bool:
    """Return True if the op of ``node`` has several results."""
    return isinstance(node.meta.get("val"), tuple | list)


def size(node: fx.Node) -> int:
    """Return the bytes of all tensors that ``node`` computes."""
    value = node.meta.get("val")
    tensors = value if isinstance(value, tuple | list) else [value]
    return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, Tensor))


def rewritable(lowered: LoweredGraph) -> tuple[str, ...]:
    """Return the names of state ports whose new value may overwrite the old one in any order that onnxruntime chooses.

    For such a port, the new value depends on every reader of the old value. This includes readers through nodes that
    onnxruntime may fuse with a later one, such as a transpose that becomes part of a product. Products have a result of
    their own, so its readers do not count. Ops that may be fused with the last node work entry by entry, so that one
    kernel can read the old value and write the new one.
    """
    nodes = [node for node in lowered.module.graph.nodes if node.op == "placeholder"]
    inputs = dict(zip(lowered.inputs, nodes, strict=True))
    made = dict(zip(lowered.outputs, results(lowered.module.graph), strict=True))
    both = [name for name in inputs if role_of(name) == "state" and name in made]
    behind = Dependencies(lowered.module.graph)
    return tuple(
        name
        for name in both
        if lowered.inputs[name] == lowered.outputs[name]
        and not is_read_within(inputs[name], made[name])
        and unordered_readers(inputs[name], made[name], behind) == []
    )


def unordered_readers(old: fx.Node, new: fx.Node, behind: Dependencies) -> list[fx.Node] | None:
    """Return the readers of ``old`` that ``new`` does not depend on, so that they might run after ``new``.

    Args:
        old: placeholder of a state.
        new: node of its next value.
        behind: dependencies of their graph.

    Returns:
        The nodes; [] if there are none; None if the op of ``new`` is not element-wise.
    """
    if new.op != "call_function" or not is_pointwise(new):
        return None
    return behind.unordered(old, new)


def is_read_within(old: fx.Node, new: fx.Node) -> bool:
    """Return True if a kernel fused for ``new`` may read ``old`` by an op other than arithmetic.

    Nodes may be fused with ``new`` if only nodes fused with ``new`` read their results.
    """
    own, waiting = {new}, list(new.all_input_nodes)
    odd: set[fx.Node] = set()
    while waiting:
        node = waiting.pop()
        if node in own or node.op != "call_function" or not own.issuperset(node.users):
            continue  # the last of its readers leads here again
        own.add(node)
        waiting += node.all_input_nodes
        if node.target not in _ARITHMETIC or not odd.isdisjoint(node.users):
            odd.add(node)
    return any(_is_old(value, old) for node in odd for value in node.all_input_nodes)


def _is_old(node: fx.Node, old: fx.Node) -> bool:
    """Return True if ``node`` is ``old``, or computed from it by views, transposes and factors only."""
    if node is old:
        return True
    through = node.target in _VIEWS or node.target in _MOVES or node.target in _FACTORS
    return through and any(_is_old(value, old) for value in node.all_input_nodes)


class Dependencies:
    """Dependencies between the nodes of a graph, stored as one bit for each node."""

    def __init__(self, graph: fx.Graph) -> None:
        self._bits = {node: 1 << place for place, node in enumerate(graph.nodes)}
        self._sources: dict[fx.Node, int] = {}
        for node in self._bits:
            # Where only a shape is read nothing has to be there.
            inputs = () if node.target in _SHAPED else node.all_input_nodes
            self._sources[node] = functools.reduce(operator.or_, map(self._up_to, inputs), 0)

    def has(self, node: fx.Node, source: fx.Node) -> bool:
        """Return True if ``node`` depends on ``source``, directly or through other nodes."""
        return bool(self._sources[node] & self._bits[source])

    def count(self, node: fx.Node) -> int:
        """Return the number of nodes that ``node`` depends on."""
        return self._sources[node].bit_count()

    def unordered(self, old: fx.Node, new: fx.Node) -> list[fx.Node]:
        """Return the readers of ``old`` that ``new`` does not depend on.

        Nodes that read ``old`` through other nodes count as well, but not through products or through ``new``.
        """
        only_given = all(user.op == "output" for user in new.users)
        readers = self._readers[old] if only_given else self._readers_beside(old, new)
        found = readers & ~self._sources[new] & ~self._bits[new]
        return [node for node, bit in self._bits.items() if found & bit] if found else []

    @functools.cached_property
    def _readers(self) -> dict[fx.Node, int]:
        """Bit mask of the direct and indirect readers of each node; indirect ones not through products."""
        readers: dict[fx.Node, int] = {}
        for node in reversed(self._bits):
            through = [user for user in self._users(node) if user.target not in PRODUCTS]
            bits = [self._bits[user] for user in self._users(node)]
            readers[node] = functools.reduce(operator.or_, [*bits, *map(readers.__getitem__, through)], 0)
        return readers

    def _readers_beside(self, old: fx.Node, new: fx.Node) -> int:
        """Return the bit mask of direct and indirect readers of ``old``, not through products or ``new``."""
        readers, waiting = 0, [old]
        while waiting:
            for user in self._users(waiting.pop()):
                if user is not new and not readers & self._bits[user]:
                    readers |= self._bits[user]
                    waiting += [user] * (user.target not in PRODUCTS)
        return readers

    def _users(self, node: fx.Node) -> list[fx.Node]:
        """Return the users of ``node``, without the graph's output if ``node`` is element-wise."""
        return [user for user in node.users if user.op != "output" or not is_pointwise(node)]

    def _up_to(self, node: fx.Node) -> int:
        return self._bits[node] | self._sources[node]


def _live(
    nodes: Sequence[fx.Node], owner: dict[fx.Node, fx.Node], reads: dict[fx.Node, list[int]]
) -> tuple[int, ...]:
    ends: dict[int, int] = {}
    memory = sum(size(node) for node in nodes if node.op in ("placeholder", "get_attr"))
    live = []
    for index, node in enumerate(nodes):
        if node.op == "call_function" and owner[node] is node:
            new = size(node)
            dying = [v for v in {owner[a] for a in node.all_input_nodes} if _dies(v, index, reads)]
            in_place = is_pointwise(node) and any(size(value) == new for value in dying)
            live.append(memory + (0 if in_place else new) + workspace(node))
            if not has_many(node):
                memory += new
                last = reads[node][-1] if reads[node] else index
                ends[last] = ends.get(last, 0) + new
        else:
            live.append(memory)
        memory -= ends.pop(index, 0)
    return tuple(live)


def around_products(
    nodes: Sequence[fx.Node], owner: Callable[[fx.Node], fx.Node], is_product: Callable[[fx.Node], bool]
) -> set[fx.Node]:
    """Return the values that bypass a product, such as the residual branch of a network.

    Computing such a value again would need the one before it, and so on through the whole network. A value that depends
    on no product, such as a masked weight, is not included.

    Args:
        nodes: nodes of the graph in order.
        owner: function that returns the node that owns the memory of a value.
        is_product: function that returns True for a product.
    """
    rank: dict[fx.Node, int] = {}
    around: set[fx.Node] = set()
    for node in nodes:
        reads = node.all_input_nodes
        most = max((rank[read] for read in reads), default=0)
        around.update(owner(read) for read in reads if 0 < rank[read] < most)
        rank[node] = most + is_product(node)
    return around


def workspace(node: fx.Node) -> int:
    """Return the bytes that an op needs while it runs, besides operands and results.

    onnxruntime's Where fills a tensor for each branch and then merges them. All other ops need 0.
    """
    return 2 * size(node) if node.target is _aten.where.self else 0


def _dies(value: fx.Node, index: int, reads: dict[fx.Node, list[int]]) -> bool:
    return value.op == "call_function" and reads[value][-1] == index


def is_pointwise(node: fx.Node) -> bool:
    """Return True if each entry of the result depends on the same entry of each argument alone."""
    return torch.Tag.pointwise in getattr(node.target, "tags", ())
