"""Layers that have become constant altogether leave the graph, and with them all that only led to them."""

from __future__ import annotations

from operator import attrgetter

from torch import Tensor, fx

from edgefl.submodels.compaction.constants import Values
from edgefl.submodels.compaction.ops import ADDITIONS, packet


def without_constants(unit: fx.GraphModule, known: Values) -> fx.GraphModule:
    """The graph with every constant summand given as a tensor of the state, and without what led to it."""
    graph = unit.graph
    for node in list(graph.nodes):
        if node not in known.carried or not known.is_constant(node):
            continue
        users = [user for user in node.users if _adds(user, node, known)]
        if users:
            unit.register_buffer(f"{node.name}_constant", _smallest(known.of[node]))
            with graph.inserting_before(node):
                constant = graph.get_attr(f"{node.name}_constant")
            for user in users:
                user.replace_input_with(node, constant)
    graph.eliminate_dead_code()
    return fx.GraphModule(_targets(unit), graph).eval()


def _adds(user: fx.Node, node: fx.Node, known: Values) -> bool:
    """Whether ``user`` adds ``node`` to a value of the same shape that is not constant."""
    if packet(user) not in ADDITIONS or known.is_constant(user):
        return False
    others = [other for other in user.all_input_nodes if other is not node]
    return len(others) == 1 and known.of[others[0]].shape == known.of[node].shape


def _smallest(value: Tensor) -> Tensor:
    """``value`` as float32, of size 1 along the dimensions along which it does not change, as along the batch."""
    for dim in range(value.dim()):
        first = value.narrow(dim, 0, 1)
        if bool((value == first).all()):
            value = first
    return value.float().contiguous()


def _targets(unit: fx.GraphModule) -> dict[str, object]:
    """What the graph of ``unit`` reads, by path."""
    targets: dict[str, object] = {}
    for node in unit.graph.nodes:
        if node.op in ("call_module", "get_attr"):
            targets[node.target] = attrgetter(node.target)(unit)
    return targets
