"""Writer of ExecuTorch programs: a graph of core ops in, bytes of a .pte file out. No other module writes that format.

The program is written directly, not by ``executorch.exir``, which would trace the graph three times more: our order
of execution, our regions for XNNPACK (:mod:`.partition`, :mod:`edgefl_export.executorch.xnnpack`), our arena
(:mod:`edgefl_export.executorch.arena`). It has one method, ``forward``, with the inputs and outputs of the
captured function, in order, in memory that the caller gives. Equal functions give equal bytes.

A runtime's interface that only loads and executes, such as ExecuTorch's own for Android, has no way to give memory for
outputs. For it they are planned: they lie in the arena, and the caller copies them out after each call.

State may be written where it was read if no reader of the old value runs after the write begins.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from edgefl.contract.tensors import TensorSpec, role_of
from edgefl.wire.bundle.graphs import parse_rows, rows_of_port
from edgefl_export.artifact import Artifact
from edgefl_export.capture.graph import LoweredGraph
from edgefl_export.capture.nodes import fake_value, node_argument, results
from edgefl_export.capture.refusals import check_floats
from edgefl_export.executorch.graph import VIEWS, base_of, to_kernel_ops
from edgefl_export.executorch.program.emit import EmittedProgram, emit
from edgefl_export.executorch.program.kernels import ProgramStep, check
from edgefl_export.executorch.program.partition import end_of_forward, recompute, steps_of
from edgefl_export.executorch.xnnpack.region import supported
from edgefl_export.memory.usage import is_pointwise
from edgefl_export.releases import least_executorch
from edgefl_export.sources import program_nodes

_aten = torch.ops.aten

# Updates of large state row by row: values between the old and the new state stay in a cache.
#
# As one graph has it, each op of ``m <- mu m + g + d w; w <- w - lr m`` goes through memory: fifteen times for a weight that
# no cache holds. Here a block of rows goes through all of them, its gradient's product included, before the next begins.
# The blocks are ports of the program, named by their rows (:mod:`edgefl.wire.bundle.graphs`): they lie in the memory of the
# whole. :mod:`edgefl_export.onnx.rows` is the same for ONNX.

BLOCK_BYTES = 1 << 19
"""Size of a block of rows: three of them fit into a processor's own cache of 2 MB. CNN's step takes 52.6 ms, 55.9 with
blocks of 1 MB, 62.2 whole (by turns, Intel Xeon)."""
LARGE_BYTES = 1 << 21
"""Smallest size of a state, in bytes, that is updated in blocks."""

Shape = tuple[int, ...]


def has_large_state(lowered: LoweredGraph) -> bool:
    """Return True if a step has state of at least :data:`LARGE_BYTES` that can be updated in blocks of rows."""
    return bool(_large(lowered))


def by_rows(lowered: LoweredGraph, module: fx.GraphModule) -> LoweredGraph | None:
    """Divide the updates of large state into blocks of rows.

    Args:
        lowered: graph of a step.
        module: the same graph in kernel ops; it is rewritten in place.

    Returns:
        The graph with its new ports, which are rows of the old ones; None if there is nothing to divide.
    """
    updates = [each for shape in sorted(_large(lowered)) for each in _updates(lowered, module, shape)]
    if not updates:
        return None
    return _RowUpdateWriter(lowered, module).written(updates)


def _large(lowered: LoweredGraph) -> set[Shape]:
    """Return the shapes of large float32 matrices of state that the step reads and returns."""
    return {
        spec.shape
        for name, spec in lowered.outputs.items()
        if role_of(name) == "state"
        and lowered.inputs.get(name) == spec
        and spec.dtype == torch.float32
        and len(spec.shape) == 2
        and spec.shape[0] > 1
        and 4 * math.prod(spec.shape) >= LARGE_BYTES
    }


@dataclass(frozen=True)
class _StateUpdate:
    """Update of state tensors (weights, momentum) of one shape, as nodes of the graph.

    Attributes:
        shape: Shape of the state.
        nodes: Element-wise nodes that compute the new state, in order of execution.
        products: Matrix products (``mm``) of that shape, such as gradients, whose results only ``nodes`` read.
    """

    shape: Shape
    nodes: tuple[fx.Node, ...]
    products: frozenset[fx.Node]


def _updates(lowered: LoweredGraph, module: fx.GraphModule, shape: Shape) -> Iterator[_StateUpdate]:
    """Yield the updates of state of ``shape`` whose gradient is a matrix product; others would gain nothing."""
    made = dict(zip(lowered.outputs, results(module.graph), strict=True))
    ends = {node for name, node in made.items() if role_of(name) == "state" and name in lowered.inputs}
    kept = {node for name, node in made.items() if node not in ends}
    chosen: dict[fx.Node, None] = {}
    for node in reversed(module.graph.nodes):
        if node in kept or not _is_entrywise(node, shape):
            continue
        readers = [user for user in node.users if user.op != "output"]
        if (readers or node in ends) and all(user in chosen for user in readers):
            chosen[node] = None
    for nodes in _group_connected([*chosen][::-1]):
        read = {each for node in nodes for each in node.all_input_nodes}
        products = frozenset(each for each in read if _is_product_for(each, nodes, shape))
        if products and any(each.op == "placeholder" and fake_value(each).shape == shape for each in read):
            yield _StateUpdate(shape, nodes, products)


def _is_entrywise(node: fx.Node, shape: Shape) -> bool:
    return (
        node.op == "call_function"
        and is_pointwise(node)
        and supported(node)
        and tuple(fake_value(node).shape) == shape
    )


def _is_product_for(node: fx.Node, nodes: Sequence[fx.Node], shape: Shape) -> bool:
    is_product = node.target is _aten.mm.default and tuple(fake_value(node).shape) == shape
    return is_product and all(user in nodes for user in node.users)


def _group_connected(nodes: Sequence[fx.Node]) -> list[tuple[fx.Node, ...]]:
    """Return ``nodes`` in groups that are connected by reading each other's results; each group in order."""
    groups: list[tuple[fx.Node, ...]] = []
    for node in nodes:
        mine = [each for each in groups if any(read in each for read in node.all_input_nodes)]
        joined = tuple(each for group in mine for each in group)
        groups = [each for each in groups if each not in mine] + [(*joined, node)]
    return groups


class _RowUpdateWriter:
    """Writer of updates in blocks of rows, at the end of a graph."""

    def __init__(self, lowered: LoweredGraph, module: fx.GraphModule) -> None:
        self._lowered, self._module = lowered, module
        self._graph = module.graph
        self._end = self._graph.output_node()
        self._ports = dict(zip(self._graph.find_nodes(op="placeholder"), lowered.inputs, strict=True))
        self._rows: dict[str, fx.Node] = {}
        self._made: dict[fx.Node, list[fx.Node]] = {}

    def written(self, updates: Sequence[_StateUpdate]) -> LoweredGraph:
        for update in updates:
            for start, stop in _blocks(update.shape):
                self._block(update, start, stop)
        outputs = self._outputs()
        self._graph.eliminate_dead_code()
        return replace(self._lowered, module=self._module, inputs=self._inputs(), outputs=outputs)

    def _block(self, update: _StateUpdate, start: int, stop: int) -> None:
        rows: dict[fx.Node, fx.Node] = {}
        with self._graph.inserting_before(self._end):
            for node in update.nodes:
                for read in node.all_input_nodes:
                    if read not in rows:
                        rows[read] = self._part(read, update, start, stop)
                rows[node] = self._copy_rows(node, rows, start, stop)
                self._made.setdefault(node, []).append(rows[node])

    def _part(self, node: fx.Node, update: _StateUpdate, start: int, stop: int) -> fx.Node:
        """Return rows ``start`` to ``stop`` of a value that the update reads; the node itself if it has one row for all."""
        shape = fake_value(node).shape
        if len(shape) < len(update.shape) or shape[0] == 1:
            return node
        if node in update.products:
            left, right = node_argument(node, 0), node_argument(node, 1)
            made = self._graph.call_function(_aten.mm.default, (self._slice(left, start, stop), right))
            made.meta = node.meta | {"val": _of_rows(node, start, stop)}
            return made
        if node in self._ports and role_of(self._ports[node]) == "state":
            return self._port(node, start, stop)
        return self._slice(node, start, stop)

    def _copy_rows(self, node: fx.Node, rows: Mapping[fx.Node, fx.Node], start: int, stop: int) -> fx.Node:
        copy = self._graph.node_copy(node, lambda read: rows.get(read, read))
        copy.meta["val"] = _of_rows(node, start, stop)
        return copy

    def _slice(self, node: fx.Node, start: int, stop: int) -> fx.Node:
        made = self._graph.call_function(_aten.slice.Tensor, (node, 0, start, stop))
        made.meta["val"] = _of_rows(node, start, stop)
        return made

    def _port(self, node: fx.Node, start: int, stop: int) -> fx.Node:
        name = rows_of_port(self._ports[node], start, stop)
        if name not in self._rows:
            last = self._graph.find_nodes(op="placeholder")[-1]
            with self._graph.inserting_after(last):
                made = self._graph.placeholder(f"rows_{len(self._rows)}")
            made.meta["val"] = _of_rows(node, start, stop)
            self._rows[name] = made
        return self._rows[name]

    def _outputs(self) -> dict[str, TensorSpec]:
        """Replace divided results of the graph by their blocks in order, and return the specs of the new output ports."""
        returned: dict[str, fx.Node] = {}
        for (name, spec), node in zip(self._lowered.outputs.items(), results(self._graph), strict=True):
            if node in self._made:
                names = [rows_of_port(name, *rows) for rows in _blocks(spec.shape)]
                returned |= zip(names, self._made[node], strict=True)
            else:
                returned[name] = node
        self._end.args = (tuple(returned.values()),)
        return {name: _spec(node) for name, node in returned.items()}

    def _inputs(self) -> dict[str, TensorSpec]:
        """Return the specs of the input ports; erase placeholders of ports of which only rows are read."""
        inputs: dict[str, TensorSpec] = {}
        names = self._ports | {node: name for name, node in self._rows.items()}
        divided = {self._ports[node] for node in self._ports if self._is_divided(node)}
        for node in self._graph.find_nodes(op="placeholder"):
            if not node.users and names[node] in divided:
                self._graph.erase_node(node)
            else:
                inputs[names[node]] = _spec(node)
        return inputs

    def _is_divided(self, port: fx.Node) -> bool:
        return any(each.startswith(f"{self._ports[port]}[") for each in self._rows)


def _of_rows(node: fx.Node, start: int, stop: int) -> torch.Tensor:
    value = fake_value(node)
    return value.new_empty((stop - start, *value.shape[1:]))


def _spec(node: fx.Node) -> TensorSpec:
    value = fake_value(node)
    return TensorSpec(tuple(value.shape), value.dtype)


def _blocks(shape: Shape) -> Iterator[tuple[int, int]]:
    rows = max(1, BLOCK_BYTES // (4 * math.prod(shape[1:])))
    return ((start, min(start + rows, shape[0])) for start in range(0, shape[0], rows))


LATE = VIEWS | {_aten.permute.default, _aten.transpose.int, _aten.t.default}
"""Ops that may be run together with their readers, and so read their argument as late as these."""

CLAMPS = frozenset({_aten.relu.default, _aten.hardtanh.default, _aten.clamp.default, _aten.clamp_min.default})

Time = tuple[int, int]


def in_place(lowered: LoweredGraph, module: fx.GraphModule, steps: Sequence[ProgramStep]) -> tuple[str, ...]:
    """Return the names of state ports whose new value may be written into the memory of the old one.

    Args:
        lowered: ports of the step.
        module: graph of the step in kernel ops.
        steps: its steps in the order of execution.
    """
    times = {node: (turn, at) for turn, step in enumerate(steps) for at, node in enumerate(step.nodes)}
    written = {node: chain for step in steps if step.delegated for node, chain in _fusion_chains(step)}
    old = dict(zip(lowered.inputs, module.graph.find_nodes(op="placeholder"), strict=True))
    held: dict[str, bool] = {}
    for name, new in zip(lowered.outputs, results(module.graph), strict=True):
        free = name in old and _is_alike(old[name], new) and role_of(name) == "state"
        places = [node for port, node in old.items() if _meet(port, name)]
        free = free and all(_is_free(each, written.get(new, [new]), times) for each in places)
        held[_whole(name)] = held.get(_whole(name), True) and free
    return tuple(name for name, free in held.items() if free)


def _whole(port: str) -> str:
    rows = parse_rows(port)
    return rows.whole if rows else port


def _meet(one: str, other: str) -> bool:
    """Return True if two ports overlap in memory; a port may be a range of rows of another."""
    first, second = parse_rows(one), parse_rows(other)
    if _whole(one) != _whole(other) or not (first and second):
        return _whole(one) == _whole(other)
    return first.start < second.stop and second.start < first.stop


def _is_alike(old: fx.Node, new: fx.Node) -> bool:
    before, after = old.meta["val"], new.meta["val"]
    return bool((before.shape, before.dtype) == (after.shape, after.dtype))


def _is_free(old: fx.Node, chain: Sequence[fx.Node], times: dict[fx.Node, Time]) -> bool:
    """Return True if the nodes of ``chain``, which may run as one, can write their result over ``old``.

    All other readers of ``old`` must run before the chain begins. ``times`` has the position of each node in the order
    of execution.
    """
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


def _fusion_chains(step: ProgramStep) -> Iterator[tuple[fx.Node, list[fx.Node]]]:
    """Yield (node, chain) for each node of a step; a clamp's chain includes the nodes that XNNPACK may fuse with it.

    If they are fused, the last node of the chain writes the result.
    """
    for node in step.nodes:
        chain = [node]
        while chain[-1].target in CLAMPS and (made := base_of(chain[-1].all_input_nodes[0])) in step.nodes:
            chain.append(made)
        yield node, chain


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the nodes that read the memory of ``node``, directly, through views or through transposes."""
    for user in node.users:
        if user.op != "call_function":
            continue
        if user.target in LATE:
            yield from _readers(user)
        if user.target not in VIEWS:
            yield user


LEAST_BYTES = 3_000_000
"""Memory of a round whose programs need almost nothing, in bytes above the idle agent."""
RUNTIME_BYTES = 700_000
"""Bytes of ExecuTorch, XNNPACK and a round besides the program, in anonymous memory above the idle agent
(:mod:`edgefl_export.memory.predict`)."""
VALUE_BYTES = 1500
"""Bytes that XNNPACK keeps for each value of a delegate and the node that computes it."""


def to_executorch(lowered: LoweredGraph, *, lean: bool = True, planned_outputs: bool = False) -> Artifact:
    """Write ``lowered`` as an ExecuTorch program and return it with its cost.

    Args:
        lowered: graph of core ops.
        lean: recompute cheap values for the backward pass and reserve the workspace at once. False is for comparisons.
        planned_outputs: outputs lie in the arena of the program instead of the caller's memory.

    Raises:
        ExportError: for an op without a kernel or a type that ExecuTorch lacks; it names module and source line.
    """
    check_floats(lowered)
    module = to_kernel_ops(lowered)
    if lean:
        recompute(module, end_of_forward(lowered, module))
    steps = steps_of(module)
    check(lowered, module, steps)
    program = emit(
        module, steps, lowered.inputs, lowered.outputs, reserve=lean, planned_outputs=planned_outputs
    )
    written = rewritten_state(lowered) if planned_outputs else in_place(lowered, module, steps)
    nodes = program_nodes(lowered, module.graph, program.instructions)
    return Artifact(
        program.model,
        planned_bytes(lowered, program, written),
        written,
        nodes,
        planned_outputs=planned_outputs,
        least_runtime=least_executorch(),
    )


def to_row_variant(lowered: LoweredGraph, artifact: Artifact) -> bytes | None:
    """Return the bytes of a variant of ``artifact``, the program of ``lowered``, that updates large state in blocks of
    rows.

    Return None if there is no such state, if ``artifact`` plans its outputs, or if the variant needs more memory or writes
    fewer states in place.
    """
    if artifact.planned_outputs or not has_large_state(lowered):
        return None
    module = to_kernel_ops(lowered)
    divided = by_rows(lowered, module)
    if divided is None:
        return None
    recompute(module, end_of_forward(divided, module))
    steps = steps_of(module)
    program = emit(module, steps, divided.inputs, divided.outputs, named=True)
    needs = planned_bytes(lowered, program, artifact.in_place)
    is_in_place = set(artifact.in_place) <= set(in_place(divided, module, steps))
    return program.model if is_in_place and needs <= artifact.planned_bytes else None


def rewritten_state(lowered: LoweredGraph) -> tuple[str, ...]:
    """Return the names of state ports whose old and new value have the same shape and dtype.

    A caller that copies outputs may copy such a new value over the old one.
    """
    return tuple(
        name
        for name, spec in lowered.outputs.items()
        if role_of(name) == "state" and name in lowered.inputs and _same_form(spec, lowered.inputs[name])
    )


def _same_form(one: TensorSpec, other: TensorSpec) -> bool:
    return (one.shape, one.dtype) == (other.shape, other.dtype)


def planned_bytes(lowered: LoweredGraph, program: EmittedProgram, written: Collection[str]) -> int:
    """Return the bytes above the idle process that one call needs.

    They consist of the program, its arena, XNNPACK's workspace, inputs, outputs, and the copy of the largest state that a
    checkpoint makes. State that is not written in place has two arrays.

    Args:
        lowered: ports of the function.
        program: the written program.
        written: names of the state ports that are written in place.
    """
    state = [_bytes(spec) for name, spec in lowered.outputs.items() if role_of(name) == "state"]
    inputs = sum(_bytes(spec) for spec in lowered.inputs.values())
    outputs = sum(_bytes(spec) for name, spec in lowered.outputs.items() if name not in written)
    own = program.arena_bytes + program.workspace_bytes + len(program.model)
    needed = (
        own
        + inputs
        + outputs
        + RUNTIME_BYTES
        + VALUE_BYTES * program.delegated_values
        + max(state, default=0)
    )
    # A device refuses a program whose arena is larger than the manifest lists.
    return max(LEAST_BYTES, program.arena_bytes, needed)


def _bytes(spec: TensorSpec) -> int:
    return math.prod(spec.shape) * spec.dtype.itemsize
