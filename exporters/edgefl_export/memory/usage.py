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
from edgefl_export.operators import AFTER, named

_aten = torch.ops.aten

# Same memory, another shape.
_VIEWS = named("view _unsafe_view reshape unsqueeze squeeze.dim squeeze.dims") | {AFTER}

_SLICE = _aten.slice.Tensor
PRODUCTS = named("mm addmm bmm")
_MOVES = named("permute transpose.int t clone")
_FACTORS = named("mul.Tensor mul.Scalar div.Tensor div.Scalar")
_ARITHMETIC = _FACTORS | named("add.Tensor add.Scalar sub.Tensor sub.Scalar where.self")
# They read the shape of their first argument, which the file holds.
_SHAPED = named("full_like empty_like zeros_like ones_like new_zeros new_ones new_full new_empty")

SMALL_BYTES = 32 * 2**10
"""Values below this are never computed twice: their sums took long, and they take nothing."""


@dataclass(frozen=True)
class Timeline:
    """Nodes in execution order, the owner of each node's memory, and the positions that read this memory.

    ``live[i]`` is the number of bytes held while node ``i`` runs: graph inputs always, outputs until the end. Of an op
    with several results, each belongs to the node that takes it out, and ends by itself.
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
    """Return the values that no input decides."""
    found: set[fx.Node] = set()
    for node in line.nodes:
        if node.op == "get_attr" or (node.op == "call_function" and found.issuperset(node.all_input_nodes)):
            found.add(node)
    return frozenset(found)


def shares(node: fx.Node) -> bool:
    """Return True if ``node`` owns no memory. The export merges slices of slices to the last one."""
    if node.op != "call_function":
        return False
    merged = node.target is _SLICE and [user.target for user in node.users] == [_SLICE]
    return merged or node.target in _VIEWS


def has_many(node: fx.Node) -> bool:
    """Return True if the op of ``node`` has several results."""
    return isinstance(node.meta.get("val"), tuple | list)


def size(node: fx.Node) -> int:
    """Return the bytes of the tensors that ``node`` makes."""
    value = node.meta.get("val")
    tensors = value if isinstance(value, tuple | list) else [value]
    return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, Tensor))


def rewritable(lowered: LoweredGraph) -> tuple[str, ...]:
    """Return the state whose new value may overwrite the old one, whatever order onnxruntime chooses.

    Whatever reads the old value leads to the new one, so it has been read by then: also where nodes are fused, whose
    inputs are then read later (a transpose becomes part of a product). Products make a tensor of their own: who reads
    that does not read the old value. And what onnxruntime may fuse with the last node, so that one kernel reads the old
    value and writes the new one, goes entry by entry.
    """
    nodes = [node for node in lowered.module.graph.nodes if node.op == "placeholder"]
    inputs = dict(zip(lowered.inputs, nodes, strict=True))
    made = dict(zip(lowered.outputs, results(lowered.module.graph), strict=True))
    both = [name for name in inputs if role_of(name) == "state" and name in made]
    behind = Behind(lowered.module.graph)
    return tuple(
        name
        for name in both
        if lowered.inputs[name] == lowered.outputs[name]
        and not is_read_within(inputs[name], made[name])
        and unordered_readers(inputs[name], made[name], behind) == []
    )


def unordered_readers(old: fx.Node, new: fx.Node, behind: Behind) -> list[fx.Node] | None:
    """Return the nodes that read ``old``, or what it is seen through, and do not lead to ``new``.

    Args:
        old: a tensor of the state.
        new: its next value.
        behind: dependencies of their graph.

    Returns:
        The nodes; None where ``new`` is not made of the elements of ``old`` one by one.
    """
    if new.op != "call_function" or not is_pointwise(new):
        return None
    return behind.unordered(old, new)


def is_read_within(old: fx.Node, new: fx.Node) -> bool:
    """Return True if an op beyond arithmetic reads ``old`` and may be fused with ``new``: all its results are for
    ``new``.
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
    """Return True if ``node`` is ``old``, or ``old`` behind changes that a kernel absorbs: another order, shape or
    factor.
    """
    if node is old:
        return True
    through = node.target in _VIEWS or node.target in _MOVES or node.target in _FACTORS
    return through and any(_is_old(value, old) for value in node.all_input_nodes)


class Behind:
    """Dependencies between the nodes of a graph, as one bit for each node."""

    def __init__(self, graph: fx.Graph) -> None:
        self._bits = {node: 1 << place for place, node in enumerate(graph.nodes)}
        self._sources: dict[fx.Node, int] = {}
        for node in self._bits:
            # Where only a shape is read nothing has to be there.
            inputs = () if node.target in _SHAPED else node.all_input_nodes
            self._sources[node] = functools.reduce(operator.or_, map(self._up_to, inputs), 0)

    def has(self, node: fx.Node, source: fx.Node) -> bool:
        """Return True if ``source`` has been computed wherever ``node`` has."""
        return bool(self._sources[node] & self._bits[source])

    def count(self, node: fx.Node) -> int:
        """Return the number of nodes that ``node`` is computed from."""
        return self._sources[node].bit_count()

    def unordered(self, old: fx.Node, new: fx.Node) -> list[fx.Node]:
        """Return the readers of ``old``, directly or through other nodes than products and ``new``, that ``new`` is not
        computed from."""
        only_given = all(user.op == "output" for user in new.users)
        readers = self._readers[old] if only_given else self._readers_beside(old, new)
        found = readers & ~self._sources[new] & ~self._bits[new]
        return [node for node, bit in self._bits.items() if found & bit] if found else []

    @functools.cached_property
    def _readers(self) -> dict[fx.Node, int]:
        """Return the readers of each node."""
        readers: dict[fx.Node, int] = {}
        for node in reversed(self._bits):
            through = [user for user in self._users(node) if user.target not in PRODUCTS]
            bits = [self._bits[user] for user in self._users(node)]
            readers[node] = functools.reduce(operator.or_, [*bits, *map(readers.__getitem__, through)], 0)
        return readers

    def _readers_beside(self, old: fx.Node, new: fx.Node) -> int:
        """Return the readers of ``old`` to which a way leads that is not through ``new``."""
        readers, waiting = 0, [old]
        while waiting:
            for user in self._users(waiting.pop()):
                if user is not new and not readers & self._bits[user]:
                    readers |= self._bits[user]
                    waiting += [user] * (user.target not in PRODUCTS)
        return readers

    def _users(self, node: fx.Node) -> list[fx.Node]:
        """Return the nodes that read ``node``. A pointwise result is given out as it was made, beside the old value."""
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
    """Return the values that go around a product, as in residual networks: to compute one again would ask for the one
    before it, and so on through the whole network. A value that no product leads to, such as a masked weight, is none.

    Args:
        nodes: of the graph, from the first on.
        owner: returns the node that makes a value's memory.
        is_product: returns True for a product.
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
    """Return the bytes that an op needs while it runs: onnxruntime's Where fills a tensor for each branch, then merges
    them.
    """
    return 2 * size(node) if node.target is _aten.where.self else 0


def _dies(value: fx.Node, index: int, reads: dict[fx.Node, list[int]]) -> bool:
    return value.op == "call_function" and reads[value][-1] == index


def is_pointwise(node: fx.Node) -> bool:
    """Return True if each entry of the result depends on the same entry of each argument alone."""
    return torch.Tag.pointwise in getattr(node.target, "tags", ())
