"""Recomputation of cheap values between forward and backward pass, instead of keeping them.

The turn is where the forward pass ends. What is read behind it must be kept, or be computed again from what is kept:
element-wise ops and movements may, products and what runs on kernels may not. The fewest bytes that separate what may
not from what is read behind the turn are a minimum cut, each value an edge as wide as its bytes.

Whatever is behind the turn and needs no gradient could run long before it. It is held back: ``meta[HELD]`` names the
node that must have run, which :mod:`.partition` obeys.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

import networkx
from torch import Tensor, fx

from edgefl.contract.tensors import role_of
from edgefl_export.capture.graph import LoweredGraph
from edgefl_export.capture.nodes import results
from edgefl_export.executorch.graph import is_name
from edgefl_export.executorch.program.kernels import ProgramStep, kernel_of
from edgefl_export.executorch.xnnpack.products import is_long_sum
from edgefl_export.executorch.xnnpack.region import costs, supported
from edgefl_export.memory.usage import SMALL_BYTES, around_products

HELD = "edgefl_after"
PRODUCT = 10.0
"""From this work on (:func:`edgefl_export.executorch.xnnpack.region.costs`) a node is not computed twice."""


def end_of_forward(lowered: LoweredGraph, module: fx.GraphModule) -> fx.Node | None:
    """Return the first metric of ``module``, the loss: nodes behind it in the trace are the backward pass."""
    made = dict(zip(lowered.outputs, results(module.graph), strict=True))
    metrics = {node for name, node in made.items() if role_of(name) == "metric"}
    return next((node for node in module.graph.nodes if node in metrics), None)


def recomputed(module: fx.GraphModule, last: fx.Node | None) -> None:
    """Rewrite ``module`` in place; ``last`` is the last node of the forward pass. Without one, nothing happens."""
    nodes = list(module.graph.nodes)
    if last is None or last.op != "call_function":
        return
    turn = nodes.index(last)
    early = {node for node in nodes[: turn + 1] if node.op == "call_function"}
    late = nodes[turn + 1 :]
    crossing = _kept(nodes[: turn + 1], early, late)
    again = _Recomputation(module.graph, early, crossing)
    for node in late:
        again.read_by(node)
    module.graph.eliminate_dead_code()
    _hold_back(module.graph, early)


def owner_of(node: fx.Node) -> fx.Node:
    """Return the node that makes the memory of ``node``."""
    while is_name(node):
        node = node.args[0]  # type: ignore[assignment]
    return node


def _size(node: fx.Node) -> int:
    """Return the bytes of a tensor; 0 for several results, which are not computed again."""
    value = node.meta["val"]
    return value.numel() * value.itemsize if isinstance(value, Tensor) else 0


def _is_repeatable(node: fx.Node) -> bool:
    return supported(node) and costs(node) < PRODUCT


def _kept(order: list[fx.Node], early: set[fx.Node], late: list[fx.Node]) -> set[fx.Node]:
    """Return the large values to keep, by a minimum cut."""
    flow = networkx.DiGraph()
    flow.add_nodes_from(("source", "sink"))
    lasting = around_products(
        order, owner_of, lambda node: node in early and supported(node) and costs(node) >= PRODUCT
    )
    for node in order:
        if not _is_large(node, early):
            continue
        flow.add_edge((node, 0), (node, 1), capacity=_size(node))
        if node in lasting or not _is_repeatable(node):
            flow.add_edge("source", (node, 0))
            continue
        for read in {owner_of(value) for value in node.all_input_nodes}:
            if _is_large(read, early):
                flow.add_edge((read, 1), (node, 0))
    for node in late:
        for read in {owner_of(value) for value in node.all_input_nodes}:
            if _is_large(read, early):
                flow.add_edge((read, 1), "sink")
    _, (before, _) = networkx.minimum_cut(flow, "source", "sink")
    return {node for node in order if (node, 0) in before and (node, 1) not in before}


def _is_large(node: fx.Node, early: set[fx.Node]) -> bool:
    return node in early and owner_of(node) is node and _size(node) >= SMALL_BYTES


class _Recomputation:
    """Copies of dropped values behind the turn."""

    def __init__(self, graph: fx.Graph, early: set[fx.Node], kept: set[fx.Node]) -> None:
        self._graph, self._early, self._kept = graph, early, kept
        self._position = {node: at for at, node in enumerate(graph.nodes)}
        self._copies: dict[fx.Node, fx.Node] = {}

    def read_by(self, node: fx.Node) -> None:
        """Make ``node`` read copies, which are inserted right before it."""
        with self._graph.inserting_before(node):
            copies = {read: self._copy(read) for read in node.all_input_nodes}
        for read, copy in copies.items():
            if copy is not read:
                node.replace_input_with(read, copy)

    def _copy(self, node: fx.Node) -> fx.Node:
        waiting, more = [node], set[fx.Node]()
        while waiting:  # no recursion: a chain may be longer than Python's stack
            each = waiting.pop()
            if each not in self._copies and each not in more:
                more.add(each)
                waiting += [] if self._stays(each) else each.all_input_nodes
        for each in sorted(more, key=self._position.__getitem__):
            stays = self._stays(each)
            self._copies[each] = each if stays else self._graph.node_copy(each, self._copies.__getitem__)
        return self._copies[node]

    def _stays(self, node: fx.Node) -> bool:
        owner = owner_of(node)
        return not _is_large(owner, self._early) or owner in self._kept or not _is_repeatable(owner)


def _hold_back(graph: fx.Graph, early: set[fx.Node]) -> None:
    """Name, for each node behind the turn that reads nothing from behind it, the gradient that has come furthest."""
    depth: dict[fx.Node, int] = {}
    furthest: fx.Node | None = None
    for node in graph.nodes:
        if node.op != "call_function" or node in early:
            continue
        behind = [depth[read] for read in node.all_input_nodes if read in depth]
        depth[node] = 1 + max(behind) if behind else 0
        if not behind and furthest is not None:
            node.meta[HELD] = furthest
        if not is_name(node) and (furthest is None or depth[node] >= depth[furthest]):
            furthest = node


# Partition of a graph into steps: regions of nodes for XNNPACK, the rest on kernels, in an order with few regions.
#
# The captured order holds within a region and within a row of kernels; between them, whatever is ready goes along
# with its kind, so that regions become large and few. Views belong nowhere: they are names for memory.

LEAST = 4.0
"""Work of a region that is worth the call: an element-wise node counts 1, a product more (``xnnpack.region.costs``)."""


def steps_of(module: fx.GraphModule) -> tuple[ProgramStep, ...]:
    """Return the steps; each node that computes is in one of them, and reads come after writes."""
    refused: set[fx.Node] = set()
    able = {node for node in module.graph.nodes if node.op == "call_function" and supported(node)}
    while True:
        steps = tuple(_scheduled(module.graph, able - refused))
        small = {node for step in steps if step.delegated and _is_small(step) for node in step.nodes}
        if not small:
            return steps
        refused |= small


def _is_small(step: ProgramStep) -> bool:
    if any(is_long_sum(node) for node in step.nodes):
        return False
    work = sum(costs(node) for node in step.nodes)
    return work < LEAST and all(kernel_of(node.target) for node in step.nodes)


def _scheduled(graph: fx.Graph, able: set[fx.Node]) -> Iterator[ProgramStep]:
    order = {node: index for index, node in enumerate(graph.nodes)}
    followers: dict[fx.Node, list[fx.Node]] = {}
    for node in order:
        if HELD in node.meta:
            followers.setdefault(node.meta[HELD], []).append(node)
    waiting = {
        node: len({*node.all_input_nodes}) + (HELD in node.meta)
        for node in order
        if node.op == "call_function"
    }
    queue = _ReadyQueue(order, able)
    for node in [node for node, count in waiting.items() if not count]:
        queue.put(node)
    for node in order:
        if node.op in ("placeholder", "get_attr"):
            _release(node, waiting, queue, followers)
    while queue:
        while (node := queue.next_kernel()) is not None:
            yield ProgramStep((node,), delegated=False)
            _release(node, waiting, queue, followers)
        region: list[fx.Node] = []
        while (node := queue.next_able()) is not None:
            region.append(node)
            _release(node, waiting, queue, followers)
        if region:
            yield ProgramStep(tuple(region), delegated=True)


def _release(
    node: fx.Node, waiting: dict[fx.Node, int], queue: _ReadyQueue, held: dict[fx.Node, list[fx.Node]]
) -> None:
    """Mark ``node`` as computed for its users, and views of it with it."""
    for user in [*node.users, *held.get(node, ())]:
        if user.op != "call_function":
            continue
        waiting[user] -= 1
        if not waiting[user]:
            queue.put(user)
            if is_name(user):
                _release(user, waiting, queue, held)


class _ReadyQueue:
    """Ready nodes by kind, earliest in the captured order first."""

    def __init__(self, order: dict[fx.Node, int], able: set[fx.Node]) -> None:
        self._order, self._able = order, able
        self._nodes = list(order)
        self._kernels: list[int] = []
        self._regions: list[int] = []

    def __bool__(self) -> bool:
        return bool(self._kernels or self._regions)

    def put(self, node: fx.Node) -> None:
        if not is_name(node):
            heapq.heappush(self._regions if node in self._able else self._kernels, self._order[node])

    def next_kernel(self) -> fx.Node | None:
        return self._nodes[heapq.heappop(self._kernels)] if self._kernels else None

    def next_able(self) -> fx.Node | None:
        return self._nodes[heapq.heappop(self._regions)] if self._regions else None
