"""Partition of a graph into steps: regions of nodes for XNNPACK, the rest on kernels, in an order with few regions.

The captured order holds within a region and within a row of kernels; between them, whatever is ready goes along
with its kind, so that regions become large and few. Views belong nowhere: they are names for memory.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx

from edgefl_export.executorch.graph import is_name
from edgefl_export.executorch.program.keep import HELD
from edgefl_export.executorch.program.kernels import kernel_of
from edgefl_export.executorch.xnnpack.region import costs, supported
from edgefl_export.executorch.xnnpack.sums import is_long_sum

LEAST = 4.0
"""Work of a region that is worth the call: an element-wise node counts 1, a product more (``xnnpack.region.costs``)."""


@dataclass(frozen=True)
class ProgramStep:
    """Nodes that run together: on XNNPACK if ``delegated``, else one node, on its kernel."""

    nodes: tuple[fx.Node, ...]
    delegated: bool


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
    waiting = {node: len(_reads(node)) + (HELD in node.meta) for node in order if node.op == "call_function"}
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


def _reads(node: fx.Node) -> set[fx.Node]:
    return set(node.all_input_nodes)


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
