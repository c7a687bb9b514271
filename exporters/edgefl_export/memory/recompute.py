"""Recomputation: values that the backward pass reads are dropped after the forward pass and computed again later.

The graph is read as a timeline. Its *turn* is the moment at which most bytes are held for a later use: in a training
step, the moment between forward and backward pass. A plan lists the values to keep; all others are computed a second time
after the turn, from the kept ones. Plans range from "compute only cheap values again" to "keep the values that cross a
few cuts, compute all others again" (Chen et al., "Training deep nets with sublinear memory cost", arXiv 1604.06174). The
cheapest plan that fits the budget is used.

Runtimes merge equal computations, and would merge the second with the first. So the second one reads its inputs through
``edgefl::after(x, trigger)``, which returns x once the gradient ``trigger`` has been computed.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.utils.flop_counter import flop_registry

from edgefl.contract.tensors import TensorSpec, role_of
from edgefl.errors import ConfigError
from edgefl.system.sizes import parse_budget
from edgefl_export.capture.graph import LoweredGraph
from edgefl_export.capture.nodes import copy_of, delay, fake_value, results
from edgefl_export.memory.predict import predicted_peak
from edgefl_export.memory.usage import (
    SMALL_BYTES,
    Dependencies,
    Timeline,
    around_products,
    has_many,
    is_pointwise,
    is_read_within,
    size,
    timeline,
    unordered_readers,
)
from edgefl_export.operators import AFTER, aten_ops

RUNTIME_BYTES = 36 * 2**20
"""Bytes that onnxruntime itself needs for a training graph, above the idle process; the rest of a budget is for tensors.

Measured for graphs of some 2,500 nodes: 9 MiB for the first session, 12 for the nodes, up to 17 for gaps between the
arena's blocks and for the kernels' own memory.
"""

NEXT_TO_NOTHING, BYTE = 0.09, 10
"""Share of a graph's work that :func:`lean` may add, and the number of operations that a moved byte counts for.

With 8 % more work by this count, ResNet-20's step takes as long as before; with 10 and 16 %, ViT's and MobileNet's steps
take 8 and 21 % longer.
"""
WORTH = 0.9
"""Largest share of the old peak that :func:`lean` accepts as new peak, because added nodes cost time and memory, too."""

# A value waits if no node reads it for this share of the timeline.
WAITING = 0.03
# Bytes of dropped values between two cuts, as shares of all bytes that wait: the plans that are tried.
SPACINGS = (1 / 16, 1 / 12, 1 / 9, 1 / 7, 1 / 6, 1 / 5, 1 / 4, 1 / 3)


@dataclass(frozen=True)
class Budget:
    """Limit for the peak memory of a device in training, above its idle process.

    Attributes:
        count: number of bytes. If ``relative``, a share of the bytes that the tensors of a step take without
            recomputation, to which the memory of the runtime itself is added.
        relative: ``count`` is a share.
    """

    count: float
    relative: bool = False

    @classmethod
    def parse(cls, text: str) -> Budget:
        """Return the budget for a text such as ``"48MiB"``, ``"100 MB"`` or ``"50%"``; the last one is relative.

        Raises:
            ConfigError: if the text is neither a size nor a percentage.
        """
        try:
            amount, relative = parse_budget(text)
        except ValueError as error:
            raise ConfigError(str(error), found=text) from error
        return cls(amount, relative)

    def of(self, lowered: LoweredGraph) -> int:
        """Return the budget for a graph in bytes, including the memory of the runtime itself."""
        if not self.relative:
            return int(self.count)
        return int(self.count * timeline(lowered.module).peak) + beside_tensors(lowered)


_EXPENSIVE_FLOPS_PER_BYTE = 2.0
_aten = torch.ops.aten
# Computed as a series or by a loop over an axis: several times the time of arithmetic.
_SLOW = aten_ops(
    "exp log erf tanh sigmoid pow.Tensor_Scalar pow.Tensor_Tensor sin cos _softmax _log_softmax cumsum sort"
)


@dataclass(frozen=True)
class RecomputedGraph:
    """Graph with recomputation.

    Attributes:
        module: the rewritten graph.
        peak: largest number of bytes that its tensors take at once.
        cost: operations plus bytes of the values that are computed a second time.
    """

    module: fx.GraphModule
    peak: int
    cost: float


@dataclass(frozen=True)
class _CutPoint:
    """Position in the forward pass at which a plan keeps all crossing values, with the cheapest sequence of such cuts
    up to it.

    Attributes:
        made: bytes of the values before the cut that the backward pass reads.
        kept: bytes of the values that cross this cut and all cuts before it in the sequence.
        before: previous cut of the sequence; None for the start.
        values: values that cross this cut.
    """

    made: int
    kept: int
    before: _CutPoint | None
    values: frozenset[fx.Node]


def beside_tensors(lowered: LoweredGraph) -> int:
    """Return an upper bound of the bytes that a device needs besides the tensors of one run.

    These are the memory of the runtime and a second set of buffers for the state that the step writes. State that is
    written in place does not need the second buffer (:class:`edgefl_device.engine.onnx.OnnxGraph`).
    """
    specs = [spec for name, spec in lowered.outputs.items() if role_of(name) == "state"]
    return RUNTIME_BYTES + sum(math.prod(spec.shape) * spec.dtype.itemsize for spec in specs)


def peak_bytes(lowered: LoweredGraph) -> int:
    """Return an upper estimate of the peak memory of a device that runs ``lowered``, in bytes above its idle process."""
    return timeline(lowered.module).peak + beside_tensors(lowered)


def lean(lowered: LoweredGraph) -> LoweredGraph:
    """Return ``lowered``, rewritten with nearly free recomputation and delayed state updates if these lower its
    predicted peak memory.
    """
    return lean_and_peak(lowered)[0]


def lean_and_peak(lowered: LoweredGraph) -> tuple[LoweredGraph, int]:
    """Return (graph, predicted peak in bytes), with nearly free recomputation and delayed state updates if they lower
    the peak.

    Results of arithmetic and copies are computed again after the forward pass, unless they bypass a product. This is
    done only if it adds at most :data:`NEXT_TO_NOTHING` of the graph's work and leaves less than :data:`WORTH` of its
    peak.
    """
    line = timeline(lowered.module)
    plan = _RecomputePlanner(lowered.module, line).cheap()
    peak = predicted_peak(lowered)
    if _work(plan.module) <= (1 + NEXT_TO_NOTHING) * _work(lowered.module):
        leaner = replace(lowered, module=plan.module)
        leaner_peak = predicted_peak(leaner)
        if leaner_peak < WORTH * peak:
            lowered, peak = leaner, leaner_peak
    return delay_updates(lowered, peak)


def _work(module: fx.GraphModule) -> float:
    """Return the operations of a graph plus :data:`BYTE` times the bytes of its values."""
    return sum(flops(node) + BYTE * size(node) for node in module.graph.nodes if node.op == "call_function")


def plans(lowered: LoweredGraph) -> Iterator[RecomputedGraph]:
    """Yield plans with recomputation, the cheapest one first, each with a lower peak than all before it."""
    line = timeline(lowered.module)
    lowest = math.inf
    for plan in sorted(_RecomputePlanner(lowered.module, line).plans(), key=lambda plan: plan.cost):
        if plan.peak < lowest:
            lowest = plan.peak
            yield plan


class _RecomputePlanner:
    """Planner of recomputation for one graph."""

    def __init__(self, module: fx.GraphModule, line: Timeline) -> None:
        self.module, self.line = module, line
        self.turn = _turn(line)

    def cheap(self) -> RecomputedGraph:
        """Return the plan that computes all values again except products, slow functions and values that bypass
        products.
        """
        early = self.line.nodes[: self.turn + 1]
        around = around_products(early, self.line.owner.__getitem__, _is_expensive)
        slow = {node for node in early if node.target in _SLOW}
        return self._keeping(self._expensive() | around | slow)

    def _expensive(self) -> frozenset[fx.Node]:
        return frozenset(node for node in self.line.nodes if _is_expensive(node))

    def plans(self) -> Iterator[RecomputedGraph]:
        waiting = {node for node in self.line.nodes[: self.turn + 1] if _waits(node, self.line, self.turn)}
        total = sum(size(node) for node in waiting)
        yield self._keeping(self._expensive())
        for spacing in SPACINGS:
            yield self._keeping(_crossing(self.line, self.turn, waiting, total * spacing))

    def _keeping(self, kept: frozenset[fx.Node]) -> RecomputedGraph:
        writer = _GraphRewriter(self.line, self.turn, kept)
        rewritten = _LazyGraphModule(self.module, writer.write())
        rewritten.graph.eliminate_dead_code()
        return RecomputedGraph(rewritten, timeline(rewritten).peak, writer.cost)


def _turn(line: Timeline) -> int:
    """Return the position of the end of the forward pass.

    It is shortly before the position at which most bytes are held for later nodes.
    """
    least = max(2, int(len(line.nodes) * WAITING))
    change = [0] * (len(line.nodes) + 1)
    for node in line.nodes:
        uses = [line.position[node], *line.reads[node]]
        for before, after in pairwise(uses):
            if node.op == "call_function" and after - before > least:
                change[before + 1] += size(node)
                change[after] -= size(node)
    waiting_bytes = list(accumulate(change))
    # A little before the most: by then the backward pass may have begun, and its own values must not count as early.
    return next(index for index, count in enumerate(waiting_bytes) if count >= 0.9 * max(waiting_bytes))


def _waits(node: fx.Node, line: Timeline, turn: int) -> bool:
    """Return True if the memory of ``node`` has at least :data:`SMALL_BYTES` and is read after the end of the forward
    pass.

    ``turn`` is the position of that end.
    """
    reads = line.reads[node]
    owns = node.op == "call_function" and line.owner[node] is node
    return owns and size(node) >= SMALL_BYTES and bool(reads) and reads[-1] > turn


def _crossing(line: Timeline, turn: int, waiting: set[fx.Node], spacing: float) -> frozenset[fx.Node]:
    """Return the values to keep for the backward pass: those that cross the cheapest sequence of cuts.

    Between two cuts lie at most ``spacing`` bytes of values in ``waiting``, or a single larger value. Among such
    sequences, the one with the fewest bytes of kept values is chosen by a shortest path over the places for a cut.

    Args:
        line: nodes of the graph in order.
        turn: position of the last node of the forward pass.
        waiting: values of the forward pass that the backward pass reads.
        spacing: bytes between two cuts.
    """
    cuts = [_CutPoint(0, 0, None, frozenset())]
    made = 0
    for index, values in _crossings(line, turn):
        made += size(line.nodes[index]) if line.nodes[index] in waiting else 0
        dropped = made - sum(size(value) for value in values & waiting)
        near = [cut for cut in cuts if dropped - cut.made <= spacing] or cuts[-1:]
        before = min(reversed(near), key=lambda cut: cut.kept)
        cuts.append(_CutPoint(made, before.kept + sum(map(size, values)), before, values))
    crossing: set[fx.Node] = set()
    cut = min((cut for cut in reversed(cuts) if made - cut.made <= spacing), key=lambda cut: cut.kept)
    while cut.before is not None:
        crossing |= cut.values
        cut = cut.before
    return frozenset(crossing)


def _crossings(line: Timeline, turn: int) -> Iterator[tuple[int, frozenset[fx.Node]]]:
    """Yield (position, values) for each large value up to position ``turn``, the end of the forward pass.

    ``values`` are the large values that exist at the position and are read after it, but not later than ``turn``.
    """
    values: set[fx.Node] = set()
    for index, node in enumerate(line.nodes[: turn + 1]):
        owns = node.op == "call_function" and line.owner[node] is node and not has_many(node)
        if owns and size(node) >= SMALL_BYTES:
            values.add(node)
            values = {value for value in values if any(index < read <= turn for read in line.reads[value])}
            yield index, frozenset(values)


def _is_expensive(node: fx.Node) -> bool:
    """Return True for products, convolutions, and our ops that run whole recurrences."""
    if node.target is operator.getitem:
        return _is_expensive(node.args[0])  # type: ignore[arg-type]
    ours = getattr(node.target, "namespace", "") == "edgefl" and node.target is not AFTER
    return (ours and not is_pointwise(node)) or flops(node) > _EXPENSIVE_FLOPS_PER_BYTE * size(node)


def flops(node: fx.Node) -> float:
    """Return the floating-point operations of a product or convolution, two for each multiply-accumulate; else 0."""
    count = flop_registry.get(getattr(node.target, "overloadpacket", None))
    if count is None:
        return 0.0

    def shaped(item: Any) -> Any:
        return item.meta["val"] if isinstance(item, fx.Node) else item

    args, kwargs = fx.node.map_aggregate((node.args, node.kwargs), shaped)
    return float(count(*args, **kwargs, out_val=node.meta["val"]))


class _GraphRewriter:
    """Writer of a copy of a graph in which nodes after the turn (end of the forward pass) read recomputed values
    instead of dropped ones.

    ``cost`` is the cost of the recomputation so far, in operations and bytes.
    """

    def __init__(self, line: Timeline, turn: int, kept: frozenset[fx.Node]) -> None:
        self.line, self.turn, self.kept = line, turn, kept
        self.graph = fx.Graph()
        self.cost = 0.0
        self.first: dict[fx.Node, fx.Node] = {}
        self.again: dict[fx.Node, fx.Node] = {}
        self.late: dict[fx.Node, fx.Node] = {}
        # Head of the longest chain of nodes behind the turn: the gradient that has come furthest.
        self.depth: dict[fx.Node, int] = {}
        self.deepest = 0
        self.trigger: fx.Node | None = None

    def write(self) -> fx.Graph:
        for index, node in enumerate(self.line.nodes):
            if index > self.turn:
                self.first[node] = self._copy(node, self._reads(node))
                self._advance(node)
            else:
                self.first[node] = self._copy(node, self.first)
        return self.graph

    def _reads(self, node: fx.Node) -> dict[fx.Node, fx.Node]:
        """Return the node that replaces each operand of a node after the turn, the end of the forward pass.

        If the node reads no value from after the turn, it could run too early. So its operands are delayed until the
        trigger (a gradient) has been computed.
        """
        read = {value: self._later(value) for value in node.all_input_nodes}
        if self.trigger is not None and not any(self.line.position[value] > self.turn for value in read):
            early = [v for v in read if v.op == "call_function" and size(v) >= SMALL_BYTES]
            read |= {value: self._after(read[value]) for value in early}
        return read

    def _copy(self, node: fx.Node, read: dict[fx.Node, fx.Node]) -> fx.Node:
        return self.graph.node_copy(node, read.__getitem__)

    def _advance(self, node: fx.Node) -> None:
        self.depth[node] = 1 + max((self.depth.get(value, 0) for value in node.all_input_nodes), default=0)
        self.deepest = max(self.deepest, self.depth[node])
        value = node.meta.get("val")
        floats = isinstance(value, Tensor) and value.is_floating_point() and value.numel() > 0
        if floats and self.depth[node] >= self.deepest:
            self.trigger = self.first[node]

    def _is_dropped(self, node: fx.Node) -> bool:
        owner = self.line.owner[node]
        early = self.line.position[node] <= self.turn and owner.op == "call_function"
        if has_many(owner):
            return early  # only its results are kept, each or not
        return early and size(owner) >= SMALL_BYTES and owner not in self.kept

    def _later(self, node: fx.Node) -> fx.Node:
        """Return the node that the backward pass reads for ``node``: its first copy, or a recomputation if it was
        dropped.
        """
        if self.trigger is None or not self._is_dropped(node):
            return self.first[node]
        for value in self._chain(node):
            read = {item: self._input(item) for item in value.all_input_nodes}
            self._hold_back(read)
            self.again[value] = self._copy(value, read)
            self.cost += flops(value) + size(value)
        return self.again[node]

    def _chain(self, node: fx.Node) -> list[fx.Node]:
        """Return the dropped values to compute again for ``node``, including ``node``, in graph order."""
        nodes: set[fx.Node] = set()
        stack = [node]
        while stack:
            value = stack.pop()
            if value not in nodes and value not in self.again:
                nodes.add(value)
                stack += [item for item in value.all_input_nodes if self._is_dropped(item)]
        return sorted(nodes, key=self.line.position.__getitem__)

    def _input(self, value: fx.Node) -> fx.Node:
        """Return the node that a second computation reads for ``value``: its recomputation, or itself.

        A large value is delayed until the trigger (a gradient) has been computed, so that the second computation cannot
        run early.
        """
        if self._is_dropped(value):
            return self.again[value]
        return self._delayed_value(value) if size(value) >= SMALL_BYTES else self.first[value]

    def _hold_back(self, read: dict[fx.Node, fx.Node]) -> None:
        """Delay one operand in ``read`` if all of them are operands of the first computation.

        Otherwise runtimes would merge the second computation with the first one.
        """
        if read and all(read[value] is self.first[value] for value in read):
            value = next(iter(read))
            read[value] = self._delayed_value(value)

    def _delayed_value(self, value: fx.Node) -> fx.Node:
        if value not in self.late:
            self.late[value] = self._after(self.first[value])
        return self.late[value]

    def _after(self, node: fx.Node) -> fx.Node:
        """Return ``node``, delayed until the deepest gradient so far has been computed."""
        if not isinstance(node.meta["val"], Tensor):
            return node
        return delay(self.graph, node, self.trigger)


# Late updates: new state that waits until the old one has been read, so that it can overwrite it.
#
# A layer's input gradient reads the weight, and nothing in a graph says that it comes before the new weight: a runtime is
# free to compute that first, so the two had a place each. Here the learning rate, which the new weight is made with,
# waits for something that the input gradients lead to (:data:`edgefl_export.operators.AFTER`)::
#
#     w.next = w - lr m            ->      w.next = w - after(lr, bias.next of the layer before) m

LARGE_BYTES = 1 << 21
"""Smallest size of a state, in bytes, whose update may be delayed."""


@dataclass(frozen=True)
class _LateUpdate:
    """Update of a state that may overwrite the old value once certain readers have run.

    Attributes:
        new: node of the new value.
        readers: readers of the old value that must run before.
        reader: node that only ``new`` depends on and that reads ``factor``.
        factor: node of a single number, such as the learning rate; the update is delayed by delaying it.
    """

    new: fx.Node
    readers: Sequence[fx.Node]
    reader: fx.Node
    factor: fx.Node


def delay_updates(lowered: LoweredGraph, peak: int) -> tuple[LoweredGraph, int]:
    """Delay updates of large state until its old value has been read, if that lowers the predicted peak.

    It may not: a runtime that computes depth first may then run other nodes in an order that holds more values.

    Args:
        lowered: graph of a step; it is not changed.
        peak: its predicted peak in bytes.

    Returns:
        (graph with delayed updates, its predicted peak), or (``lowered``, ``peak``) if delaying does not help.
    """
    if not any(map(_is_large_state, lowered.outputs.items())):
        return lowered, peak
    graph, _ = copy_of(lowered.module.graph)
    late = replace(lowered, module=_LazyGraphModule(lowered.module, graph))
    if not _delay_in_place(late):
        return lowered, peak
    late.module.recompile()
    late_peak = predicted_peak(late)
    return (late, late_peak) if late_peak < peak else (lowered, peak)


def _is_large_state(port: tuple[str, TensorSpec]) -> bool:
    name, spec = port
    return role_of(name) == "state" and math.prod(spec.shape) * spec.dtype.itemsize >= LARGE_BYTES


def _delay_in_place(lowered: LoweredGraph) -> bool:
    """Delay updates of ``lowered`` in place. Return True if at least one could be delayed."""
    graph = lowered.module.graph
    behind = Dependencies(graph)
    updates = _updates(lowered, behind)
    waiting: dict[tuple[fx.Node, fx.Node], fx.Node] = {}
    for update in updates:
        trigger = _trigger(lowered, update, updates, behind)
        if trigger is None:
            continue
        key = update.factor, trigger
        if key not in waiting:
            with graph.inserting_before(graph.output_node()):
                waiting[key] = delay(graph, *key)
        update.reader.replace_input_with(update.factor, waiting[key])
        moved = _nodes_from(update.reader)
        for node in [node for node in graph.nodes if node in moved]:
            graph.output_node().prepend(node)
    return bool(waiting)


def _updates(lowered: LoweredGraph, behind: Dependencies) -> list[_LateUpdate]:
    graph = lowered.module.graph
    inputs = dict(zip(lowered.inputs, graph.find_nodes(op="placeholder"), strict=True))
    found = []
    for name, new in zip(lowered.outputs, results(graph), strict=True):
        old = inputs.get(name)
        spec = lowered.outputs[name]
        if old is None or lowered.inputs[name] != spec or not _is_large_state((name, spec)):
            continue
        readers = unordered_readers(old, new, behind)
        place = _factor(new) if readers and not is_read_within(old, new) else None
        if readers and place is not None:
            found.append(_LateUpdate(new, readers, *place))
    return found


def _factor(new: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Return (reader, factor) of the update ``new``: a node that only ``new`` depends on, and a single number it reads.

    Return None if there is none.
    """
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
    lowered: LoweredGraph, update: _LateUpdate, updates: Sequence[_LateUpdate], behind: Dependencies
) -> fx.Node | None:
    """Return the output with fewest dependencies that depends on all readers of the old state and on no delayed update.

    Return None if there is no such output.
    """
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


def _nodes_from(first: fx.Node) -> set[fx.Node]:
    """Return ``first`` and all nodes that depend on it."""
    found, waiting = set[fx.Node](), [first]
    while waiting:
        node = waiting.pop()
        found.add(node)
        waiting += [user for user in node.users if user.op != "output" and user not in found]
    return found
