"""Which state may be written where it was read: nobody reads the old value once the new one is being written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import fx

from edgefl.contract.tensors import role_of
from edgefl.wire.bundle.rows import rows_in
from exporters.capture.nodes import results
from exporters.capture.trace import Captured
from exporters.executorch.graph import VIEWS
from exporters.executorch.program.partition import Step
from exporters.memory.usage import is_pointwise

_aten = torch.ops.aten
LATE = VIEWS | {_aten.permute.default, _aten.transpose.int, _aten.t.default}
"""Ops that may read their argument as late as those that read them do."""

CLAMPS = frozenset({_aten.relu.default, _aten.hardtanh.default, _aten.clamp.default, _aten.clamp_min.default})

Time = tuple[int, int]


def in_place(captured: Captured, module: fx.GraphModule, steps: Sequence[Step]) -> tuple[str, ...]:
    """State ports whose output may have the memory of their input, in the order of the outputs."""
    times = {node: (turn, at) for turn, step in enumerate(steps) for at, node in enumerate(step.nodes)}
    written = {node: chain for step in steps if step.delegated for node, chain in _fused(step)}
    old = dict(zip(captured.inputs, module.graph.find_nodes(op="placeholder"), strict=True))
    held: dict[str, bool] = {}
    for name, new in zip(captured.outputs, results(module.graph), strict=True):
        free = name in old and _is_alike(old[name], new) and role_of(name) == "state"
        places = [node for port, node in old.items() if _meet(port, name)]
        free = free and all(_is_free(each, written.get(new, [new]), times) for each in places)
        held[_whole(name)] = held.get(_whole(name), True) and free
    return tuple(name for name, free in held.items() if free)


def _whole(port: str) -> str:
    rows = rows_in(port)
    return rows.whole if rows else port


def _meet(one: str, other: str) -> bool:
    """Whether two ports have memory in common: rows lie in their whole."""
    first, second = rows_in(one), rows_in(other)
    if _whole(one) != _whole(other) or not (first and second):
        return _whole(one) == _whole(other)
    return first.start < second.stop and second.start < first.stop


def _is_alike(old: fx.Node, new: fx.Node) -> bool:
    before, after = old.meta["val"], new.meta["val"]
    return bool((before.shape, before.dtype) == (after.shape, after.dtype))


def _is_free(old: fx.Node, chain: Sequence[fx.Node], times: dict[fx.Node, Time]) -> bool:
    """Whether the end of ``chain``, whose nodes may run as one, can be written over ``old``."""
    if chain[0] not in times:
        return False
    begun = min(times[node] for node in chain if node in times)
    for reader in _readers(old):
        if reader in chain:
            if not is_pointwise(reader) or old not in reader.all_input_nodes:
                return False
        elif times[reader] > begun:
            return False
    return True


def _fused(step: Step) -> Iterator[tuple[fx.Node, list[fx.Node]]]:
    """Clamps, each before all that XNNPACK may run it as a part of: that writes its result, as early as it runs."""
    for node in step.nodes:
        chain = [node]
        while (
            chain[-1].target in CLAMPS and (made := _seen_through(chain[-1].all_input_nodes[0])) in step.nodes
        ):
            chain.append(made)
        yield node, chain


def _seen_through(node: fx.Node) -> fx.Node:
    """What a view is of; any other node is its own."""
    while node.op == "call_function" and node.target in VIEWS:
        node = node.all_input_nodes[0]
    return node


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """Nodes that read the memory of ``node`` when they run."""
    for user in node.users:
        if user.op != "call_function":
            continue
        if user.target in LATE:
            yield from _readers(user)
        if user.target not in VIEWS:
            yield user
