"""Recomputation of cheap values between forward and backward pass, and partition of a graph into steps.

The turn is the end of the forward pass. A value that is read after the turn must be kept or computed again from kept
values. Element-wise ops and copies may be computed again; products and ops on kernels may not. The values to keep are a
minimum cut between the values that may not be repeated and the readers after the turn, where the capacity of a value is
its bytes.

A node after the turn that reads no gradient could run long before it is needed. It is delayed: ``meta[HELD]`` is the node
that must run before, and the partition obeys that.
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
"""Work (:func:`edgefl_export.executorch.xnnpack.region.costs`) from which on a node is not computed twice."""


def end_of_forward(lowered: LoweredGraph, module: fx.GraphModule) -> fx.Node | None:
    """Return the node of the first metric, the loss: nodes after it in the trace are the backward pass.

    Return None if the function has no metric.
    """
    made = dict(zip(lowered.outputs, results(module.graph), strict=True))
    metrics = {node for name, node in made.items() if role_of(name) == "metric"}
    return next((node for node in module.graph.nodes if node in metrics), None)


def recompute(module: fx.GraphModule, last: fx.Node | None) -> None:
    """Rewrite ``module`` in place so that cheap values of the forward pass are computed again for the backward pass.

    Args:
        module: graph of a training step.
        last: last node of the forward pass; if None, nothing is changed.
    """
    nodes = list(module.graph.nodes)
    if last is None or last.op != "call_function":
        return
    turn = nodes.index(last)
    early = {node for node in nodes[: turn + 1] if node.op == "call_function"}
    late = nodes[turn + 1 :]
    crossing = _values_to_keep(nodes[: turn + 1], early, late)
    again = _Recomputation(module.graph, early, crossing)
    for node in late:
        again.read_by(node)
    module.graph.eliminate_dead_code()
    _hold_back(module.graph, early)


def owner_of(node: fx.Node) -> fx.Node:
    """Return the node whose op computes the memory of ``node``: its source if it is a view or one of several results."""
    while is_name(node):
        node = node.args[0]  # type: ignore[assignment]
    return node


def _size(node: fx.Node) -> int:
    """Return the bytes of the result of ``node``; 0 for an op with several results."""
    value = node.meta["val"]
    return value.numel() * value.itemsize if isinstance(value, Tensor) else 0


def _is_repeatable(node: fx.Node) -> bool:
    return supported(node) and costs(node) < PRODUCT


def _values_to_keep(order: list[fx.Node], early: set[fx.Node], late: list[fx.Node]) -> set[fx.Node]:
    """Return the large values of the forward pass to keep, by a minimum cut.

    ``order`` and ``early`` are the nodes of the forward pass, ``late`` those after it.
    """
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
    """Writer of second copies of dropped values, for readers after the end of the forward pass."""

    def __init__(self, graph: fx.Graph, early: set[fx.Node], kept: set[fx.Node]) -> None:
        self._graph, self._early, self._kept = graph, early, kept
        self._position = {node: at for at, node in enumerate(graph.nodes)}
        self._copies: dict[fx.Node, fx.Node] = {}

    def read_by(self, node: fx.Node) -> None:
        """Replace the dropped operands of ``node`` by copies, which are inserted right before it."""
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
    """Delay backward nodes that read only values of the forward pass, so that they do not run long before they are needed.

    ``meta[HELD]`` of such a node is set to the node that must run first: the deepest gradient so far. ``early`` are
    the nodes of the forward pass.
    """
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
"""Least work of a region for XNNPACK: an element-wise node counts 1, a product more (``xnnpack.region.costs``)."""


def steps_of(module: fx.GraphModule) -> tuple[ProgramStep, ...]:
    """Return the steps of a graph in an order that respects all dependencies.

    Every node but views is in one step: in a region for XNNPACK if that can run it and the region is worth a call, else
    alone.
    """
    refused: set[fx.Node] = set()
    able = {node for node in module.graph.nodes if node.op == "call_function" and supported(node)}
    while True:
        steps = tuple(_schedule(module.graph, able - refused))
        small = {node for step in steps if step.delegated and _is_small(step) for node in step.nodes}
        if not small:
            return steps
        refused |= small


def _is_small(step: ProgramStep) -> bool:
    if any(is_long_sum(node) for node in step.nodes):
        return False
    work = sum(costs(node) for node in step.nodes)
    return work < LEAST and all(kernel_of(node.target) for node in step.nodes)


def _schedule(graph: fx.Graph, able: set[fx.Node]) -> Iterator[ProgramStep]:
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
    """Mark ``node`` and its views as computed and put the nodes that become ready into ``queue``.

    Args:
        node: computed node.
        waiting: number of operands that each node still waits for; it is changed.
        queue: receives the ready nodes.
        held: nodes that wait for a node without reading it, by that node.
    """
    for user in [*node.users, *held.get(node, ())]:
        if user.op != "call_function":
            continue
        waiting[user] -= 1
        if not waiting[user]:
            queue.put(user)
            if is_name(user):
                _release(user, waiting, queue, held)


class _ReadyQueue:
    """Queues of the nodes whose operands are computed: one for kernels, one for XNNPACK, in the captured order."""

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
