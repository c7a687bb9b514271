"""Segments of a step: graphs that run one after another and pass values across the cuts as pages.

A segment reads the inputs of the step that it needs, and values of earlier segments by ports of the role ``page``
(``page.<n>``). It returns the outputs of the step that it computes, and the values that later segments read. Views and
constants are computed again in each segment that reads them, so that each memory crosses a cut once.
"""

from __future__ import annotations

import operator
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, fx

from edgefl.contract.tensors import TensorSpec
from edgefl_export.artifact import is_page
from edgefl_export.capture.graph import LoweredGraph
from edgefl_export.capture.nodes import delay, fake_value, node_argument, read_inputs, results
from edgefl_export.memory.usage import SMALL_BYTES, Timeline, constants, is_pointwise, shares, size, timeline
from edgefl_export.operators import AFTER

_clone = torch.ops.aten.clone.default


def segments(lowered: LoweredGraph, cuts: Sequence[int]) -> tuple[LoweredGraph, ...]:
    """Cut a step into segments: graphs that run one after another and pass values across the cuts as pages.

    All segments read the state that the step started with, also after a segment that returns its new value.

    Args:
        lowered: graph of the step.
        cuts: ascending positions in the order of the nodes; a segment ends after the node at each.

    Returns:
        The segments in order, ``lowered`` alone without cuts. The ports of a segment are those of the step that it
        reads or returns, in the step's order, followed by its pages.
    """
    if not cuts:
        return (lowered,)
    crossing = PageAssignment(lowered, timeline(lowered.module), cuts)
    return tuple(_SegmentWriter(lowered, crossing, number).written() for number in range(len(cuts) + 1))


class PageAssignment:
    """Assignment of the values of a step to its segments, and to pages (ports by which a segment passes a value to
    later ones).

    Attributes:
        segment: number of the segment that computes a node.
        last_read: number of the last segment that reads a value.
        outputs: nodes of the step's outputs by name.
        pages: number of the page for each value that a later segment reads.
    """

    def __init__(self, lowered: LoweredGraph, line: Timeline, cuts: Sequence[int]) -> None:
        self.line, self._cuts = line, cuts
        self._constants = constants(line)
        self.segment = {node: self._place(node) for node in line.nodes}
        self.last_read: dict[fx.Node, int] = {}
        self.outputs = dict(zip(lowered.outputs, results(lowered.module.graph), strict=True))
        for node in line.nodes:
            if node.op == "call_function" and not self.is_again(node):
                for value in node.all_input_nodes:
                    self._read(value, self.segment[node])
        for node in self.outputs.values():
            self._read(node, self.segment[node])
        crossing = [node for node, last in self.last_read.items() if last > self.segment[node]]
        self.pages = {node: n for n, node in enumerate(sorted(crossing, key=line.position.__getitem__))}

    def is_again(self, node: fx.Node) -> bool:
        """Return True if every segment that reads ``node``, a view or a constant, computes it again."""
        return node in self._constants or self.line.owner[node] is not node

    def _place(self, node: fx.Node) -> int:
        made = node_argument(node, 0) if node.target is operator.getitem else node  # of several results
        return bisect_left(self._cuts, self.line.position[made])

    def _read(self, value: fx.Node, segment: int) -> None:
        owner = self.line.owner[value]
        if owner.op == "call_function" and owner not in self._constants:
            self.last_read[owner] = max(segment, self.last_read.get(owner, 0))


class _SegmentWriter:
    """Writer of the graph of one segment, the part of a step between two cuts, node by node."""

    def __init__(self, lowered: LoweredGraph, crossing: PageAssignment, number: int) -> None:
        self._lowered, self._crossing, self._number = lowered, crossing, number
        self._body = fx.Graph()
        self._made: dict[fx.Node, fx.Node] = {}
        self._latest: fx.Node | None = None
        placeholders = [node for node in crossing.line.nodes if node.op == "placeholder"]
        self._ports = dict(zip(placeholders, lowered.inputs.items(), strict=True))

    def written(self) -> LoweredGraph:
        inputs = self._inputs()
        self._write()
        named = self._outputs()
        self._body.output(tuple(named.values()))
        self._body.eliminate_dead_code()
        used = {name: inputs[name] for name in read_inputs(self._body, inputs)}
        _ends_in_turn(self._body)
        specs = dict(self._lowered.outputs)
        specs |= {name: TensorSpec.of(fake_value(node)) for name, node in named.items() if is_page(name)}
        return replace(
            self._lowered,
            module=fx.GraphModule(self._lowered.module, self._body),
            inputs=used,
            outputs={name: specs[name] for name in named},
            unused=(),
        )

    def _write(self) -> None:
        crossing, number = self._crossing, self._number
        for node in crossing.line.nodes:
            here = crossing.segment[node] == number
            if node.op == "call_function" and here and not crossing.is_again(node):
                read = self._reads(node)
                self._made[node] = self._body.node_copy(node, read.__getitem__)
                self._latest = self._made[node] if _is_floats(node) else self._latest

    def _outputs(self) -> dict[str, fx.Node]:
        crossing, number = self._crossing, self._number
        outputs = {name: node for name, node in crossing.outputs.items() if crossing.segment[node] == number}
        named = {name: self._value(node) for name, node in outputs.items()}
        returned = set(named.values())
        for value, page in crossing.pages.items():
            if crossing.segment[value] == number:
                named[f"page.{page}"] = self._apart(self._made[value], returned)
        return named

    def _inputs(self) -> dict[str, TensorSpec]:
        """Add placeholders for all inputs of the step, and for pages (values that earlier segments left in files).

        Unread placeholders are removed at the end. Return the shapes and dtypes of all placeholders by name.
        """
        crossing, specs = self._crossing, dict[str, TensorSpec]()
        for node, (name, spec) in self._ports.items():
            self._made[node] = self._body.node_copy(node)
            specs[name] = spec
        for value, page in crossing.pages.items():
            if crossing.segment[value] < self._number <= crossing.last_read[value]:
                made = self._body.placeholder(f"page_{page}")
                made.meta["val"] = value.meta["val"]
                self._made[value] = made
                specs[f"page.{page}"] = TensorSpec.of(fake_value(value))
        return specs

    def _reads(self, node: fx.Node) -> dict[fx.Node, fx.Node]:
        """Return the node of this segment that replaces each operand of ``node``.

        If all operands are pages (values that earlier segments left in files), a runtime could run ``node`` too early. The
        operands are then delayed until the latest value of this segment has been computed.
        """
        read = {value: self._value(value) for value in node.all_input_nodes}
        owners = {value: self._crossing.line.owner[value] for value in read}
        if self._latest is None or any(self._is_made_here(owner) for owner in owners.values()):
            return read
        return {
            value: delay(self._body, made, self._latest)
            if size(owners[value]) >= SMALL_BYTES and owners[value] in self._crossing.pages
            else made
            for value, made in read.items()
        }

    def _is_made_here(self, owner: fx.Node) -> bool:
        return owner.op == "call_function" and self._crossing.segment[owner] == self._number

    def _value(self, node: fx.Node) -> fx.Node:
        """Return the node of this segment for ``node``; insert copies of views and constants if it has none yet."""
        missing, waiting = set[fx.Node](), [node]
        while waiting:
            value = waiting.pop()
            if value not in self._made and value not in missing:
                missing.add(value)
                waiting += self._sources(value)
        for value in sorted(missing, key=self._crossing.line.position.__getitem__):
            self._made[value] = self._again(value)
        return self._made[node]

    def _again(self, node: fx.Node) -> fx.Node:
        if node.target is AFTER and len(self._sources(node)) == 1:
            return self._made[node_argument(node, 0)]
        return self._body.node_copy(node, self._made.__getitem__)

    def _sources(self, node: fx.Node) -> list[fx.Node]:
        """Return the operands of ``node`` that this segment must have.

        For an op that delays a value until a trigger, the trigger is left out if an earlier segment computes it.
        """
        if node.target is not AFTER:
            return node.all_input_nodes
        value, trigger = node_argument(node, 0), node_argument(node, 1)
        here = self._crossing.segment[self._crossing.line.owner[trigger]] == self._number
        return [value, trigger] if here else [value]

    def _apart(self, value: fx.Node, returned: set[fx.Node]) -> fx.Node:
        """Return ``value``, or a copy of it if it is already among the ``returned`` outputs."""
        if value not in returned:
            return value
        copy = self._body.call_function(_clone, (value,))
        copy.meta["val"] = value.meta["val"]
        return copy


def _is_floats(node: fx.Node) -> bool:
    """Return True if ``node`` is a floating-point tensor of at least :data:`SMALL_BYTES`."""
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.is_floating_point() and size(node) >= SMALL_BYTES


def _ends_in_turn(graph: fx.Graph) -> None:
    """Move nodes that no other node reads to the end of ``graph``, in reverse order.

    onnxruntime starts from the last of these nodes and computes everything that one needs before it turns to the next. In
    the order of the step, the gradient for the segment before would come first, and the operands of all others would be
    held until the end.
    """
    ready: dict[fx.Node, int] = {}
    ends = []
    for at, node in enumerate(graph.nodes):
        latest = max((ready[value] for value in node.all_input_nodes), default=0)
        ready[node] = latest if is_pointwise(node) or shares(node) else at
        if node.op == "call_function" and not any(user.op == "call_function" for user in node.users):
            ends.append(node)
    output = graph.output_node()
    for node in sorted(ends, key=ready.__getitem__, reverse=True):
        output.prepend(node)
