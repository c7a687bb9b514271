"""Late updates: new state that waits until the old one has been read, so that it can overwrite it.

A layer's input gradient reads the weight, and nothing in a graph says that it comes before the new weight: a runtime is
free to compute that first, so the two had a place each. Here the learning rate, which the new weight is made with,
waits for something that the input gradients lead to (:data:`edgefl_export.ordering.AFTER`)::

    w.next = w - lr m            ->      w.next = w - after(lr, bias.next of the layer before) m
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import fx
from torch.fx._lazy_graph_module import _LazyGraphModule

from edgefl.contract.tensors import TensorSpec, role_of
from edgefl_export.capture.nodes import copy_of, fake_value, results
from edgefl_export.capture.trace import LoweredGraph
from edgefl_export.memory.predict import predicted_peak
from edgefl_export.memory.usage import Behind, is_pointwise, is_read_within, unordered_readers
from edgefl_export.ordering import AFTER

LARGE_BYTES = 1 << 21
"""Of a tensor, from which on the place is worth the wait."""


@dataclass(frozen=True)
class _LateUpdate:
    """Update of a state that can overwrite the old value once ``readers`` have run.

    ``reader`` reads ``factor``, a single number; all results of it are for ``new`` alone.
    """

    new: fx.Node
    readers: Sequence[fx.Node]
    reader: fx.Node
    factor: fx.Node


def updated_last(lowered: LoweredGraph, peak: int) -> tuple[LoweredGraph, int]:
    """Return ``lowered`` with late updates if they save memory, and its predicted peak.

    A runtime that computes depth first may run all else in another order then, and keep more for it.
    """
    if not any(map(_is_large, lowered.outputs.items())):
        return lowered, peak
    graph, _ = copy_of(lowered.module.graph)
    late = replace(lowered, module=_LazyGraphModule(lowered.module, graph))
    if not _waited(late):
        return lowered, peak
    late.module.recompile()
    late_peak = predicted_peak(late)
    return (late, late_peak) if late_peak < peak else (lowered, peak)


def _is_large(port: tuple[str, TensorSpec]) -> bool:
    name, spec = port
    return role_of(name) == "state" and math.prod(spec.shape) * spec.dtype.itemsize >= LARGE_BYTES


def _waited(lowered: LoweredGraph) -> bool:
    """Make updates of ``lowered`` wait, in place; return False if none can."""
    graph = lowered.module.graph
    behind = Behind(graph)
    updates = _updates(lowered, behind)
    waiting: dict[tuple[fx.Node, fx.Node], fx.Node] = {}
    for update in updates:
        trigger = _trigger(lowered, update, updates, behind)
        if trigger is None:
            continue
        key = update.factor, trigger
        if key not in waiting:
            with graph.inserting_before(graph.output_node()):
                waiting[key] = graph.call_function(AFTER, key)
            waiting[key].meta["val"] = fake_value(update.factor)
        update.reader.replace_input_with(update.factor, waiting[key])
        moved = _from(update.reader)
        for node in [node for node in graph.nodes if node in moved]:
            graph.output_node().prepend(node)
    return bool(waiting)


def _updates(lowered: LoweredGraph, behind: Behind) -> list[_LateUpdate]:
    graph = lowered.module.graph
    inputs = dict(zip(lowered.inputs, graph.find_nodes(op="placeholder"), strict=True))
    found = []
    for name, new in zip(lowered.outputs, results(graph), strict=True):
        old = inputs.get(name)
        spec = lowered.outputs[name]
        if old is None or lowered.inputs[name] != spec or not _is_large((name, spec)):
            continue
        readers = unordered_readers(old, new, behind)
        place = _factor(new) if readers and not is_read_within(old, new) else None
        if readers and place is not None:
            found.append(_LateUpdate(new, readers, *place))
    return found


def _factor(new: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Return (reader, single number) next to ``new``, among the values computed for ``new`` alone."""
    if any(user.op != "output" for user in new.users):
        return None
    own, waiting = {new}, [new]
    while waiting:
        node = waiting.pop(0)
        for read in node.all_input_nodes:
            value = fake_value(read)
            if value.numel() == 1 and value.dtype.is_floating_point and fake_value(new).numel() > 1:
                return node, read
        for read in node.all_input_nodes:
            if read.op == "call_function" and is_pointwise(read) and own.issuperset(read.users):
                own.add(read)
                waiting.append(read)
    return None


def _trigger(
    lowered: LoweredGraph, update: _LateUpdate, updates: Sequence[_LateUpdate], behind: Behind
) -> fx.Node | None:
    """Return the first output that waits for nothing and depends on all readers of the old state."""
    late = {each.new for each in updates}
    ends = [
        node
        for node in results(lowered.module.graph)
        if node not in late
        and node.op == "call_function"
        and fake_value(node).dtype.is_floating_point
        and fake_value(node).numel()
        and not any(behind.has(node, each.reader) or node is each.reader for each in updates)
        and all(behind.has(node, reader) for reader in update.readers)
    ]
    return min(ends, key=behind.count, default=None)


def _from(first: fx.Node) -> set[fx.Node]:
    """Return the nodes behind ``first``, itself included."""
    found, waiting = set[fx.Node](), [first]
    while waiting:
        node = waiting.pop()
        found.add(node)
        waiting += [user for user in node.users if user.op != "output" and user not in found]
    return found
