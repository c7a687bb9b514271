"""What a value is computed from, as bits that spread from node to node."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import reduce
from operator import or_

from torch import fx


def inputs_of(graph: fx.Graph) -> dict[fx.Node, int]:
    """By node: a bit for each placeholder that it is computed from."""
    bits = {node: 1 << at for at, node in enumerate(graph.find_nodes(op="placeholder"))}
    return spread(graph.nodes, lambda node: bits.get(node, 0))


def spread(
    nodes: Iterable[fx.Node],
    own: Callable[[fx.Node], int],
    ends: Callable[[fx.Node], bool] = lambda node: False,
) -> dict[fx.Node, int]:
    """By node, in the order of a graph: its own bits and those of all that it is computed from; 0 where they end."""
    origins: dict[fx.Node, int] = {}
    for node in nodes:
        bits = reduce(or_, (origins[read] for read in node.all_input_nodes), own(node))
        origins[node] = 0 if ends(node) else bits
    return origins
