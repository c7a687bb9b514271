"""Writer of ExecuTorch programs: a graph of core ops in, bytes of a .pte out. No other module writes that format.

The program is written directly, not by ``executorch.exir``, which would trace the graph three times more: our order
of execution, our regions for XNNPACK (:mod:`.partition`, :mod:`edgefl_export.executorch.xnnpack`), our arena
(:mod:`edgefl_export.executorch.xnnpack.memory`). It has one method, ``forward``, with the inputs and outputs of the
captured function, in order, in memory that the caller gives. Equal functions give equal bytes.

A runtime's interface that only loads and executes, such as ExecuTorch's own for Android, has no way to give memory for
outputs. For it they are planned: they lie in the arena, and the caller copies them out after each call.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence

import torch
from torch import fx

from edgefl.contract.tensors import TensorSpec, role_of
from edgefl.wire.bundle.graphs import rows_in
from edgefl_export.artifact import Artifact
from edgefl_export.capture.graph import LoweredGraph
from edgefl_export.capture.nodes import results
from edgefl_export.capture.refusals import check_floats
from edgefl_export.executorch.graph import VIEWS, base_of, to_kernel_ops
from edgefl_export.executorch.program.emit import EmittedProgram, emit
from edgefl_export.executorch.program.kernels import ProgramStep, check
from edgefl_export.executorch.program.partition import end_of_forward, recomputed, steps_of
from edgefl_export.executorch.program.rows import by_rows, has_large_state
from edgefl_export.memory.usage import is_pointwise
from edgefl_export.releases import least_executorch
from edgefl_export.sources import program_nodes

# State may be written where it was read if no reader of the old value runs after the write begins.

_aten = torch.ops.aten
LATE = VIEWS | {_aten.permute.default, _aten.transpose.int, _aten.t.default}
"""Ops that may read their argument as late as those that read them do."""

CLAMPS = frozenset({_aten.relu.default, _aten.hardtanh.default, _aten.clamp.default, _aten.clamp_min.default})

Time = tuple[int, int]


def in_place(lowered: LoweredGraph, module: fx.GraphModule, steps: Sequence[ProgramStep]) -> tuple[str, ...]:
    """Return the state ports whose output may have the memory of their input, in the order of the outputs."""
    times = {node: (turn, at) for turn, step in enumerate(steps) for at, node in enumerate(step.nodes)}
    written = {node: chain for step in steps if step.delegated for node, chain in _fused(step)}
    old = dict(zip(lowered.inputs, module.graph.find_nodes(op="placeholder"), strict=True))
    held: dict[str, bool] = {}
    for name, new in zip(lowered.outputs, results(module.graph), strict=True):
        free = name in old and _is_alike(old[name], new) and role_of(name) == "state"
        places = [node for port, node in old.items() if _meet(port, name)]
        free = free and all(_is_free(each, written.get(new, [new]), times) for each in places)
        held[_whole(name)] = held.get(_whole(name), True) and free
    return tuple(name for name, free in held.items() if free)


def _whole(port: str) -> str:
    rows = rows_in(port)
    return rows.whole if rows else port


def _meet(one: str, other: str) -> bool:
    """Return True if two ports share memory: rows lie in their whole."""
    first, second = rows_in(one), rows_in(other)
    if _whole(one) != _whole(other) or not (first and second):
        return _whole(one) == _whole(other)
    return first.start < second.stop and second.start < first.stop


def _is_alike(old: fx.Node, new: fx.Node) -> bool:
    before, after = old.meta["val"], new.meta["val"]
    return bool((before.shape, before.dtype) == (after.shape, after.dtype))


def _is_free(old: fx.Node, chain: Sequence[fx.Node], times: dict[fx.Node, Time]) -> bool:
    """Return True if the end of ``chain``, whose nodes may run as one, can be written over ``old``."""
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


def _fused(step: ProgramStep) -> Iterator[tuple[fx.Node, list[fx.Node]]]:
    """Yield clamps, each with the nodes that XNNPACK may fuse it with: the first of them then writes the result."""
    for node in step.nodes:
        chain = [node]
        while chain[-1].target in CLAMPS and (made := base_of(chain[-1].all_input_nodes[0])) in step.nodes:
            chain.append(made)
        yield node, chain


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the nodes that read the memory of ``node`` when they run."""
    for user in node.users:
        if user.op != "call_function":
            continue
        if user.target in LATE:
            yield from _readers(user)
        if user.target not in VIEWS:
            yield user


LEAST_BYTES = 3_000_000
"""A round of programs that need next to nothing."""
RUNTIME_BYTES = 700_000
"""ExecuTorch, XNNPACK and a round around a program, in anonymous memory above the idle agent
(:mod:`edgefl_export.memory.predict`)."""
VALUE_BYTES = 1500
"""What XNNPACK keeps about each value of a delegate and the node that makes it."""


def to_executorch(lowered: LoweredGraph, *, lean: bool = True, planned_outputs: bool = False) -> Artifact:
    """Return ``lowered`` as a program of ExecuTorch 1.5.

    Raises ExportError, naming op, module and source line, for an op without a kernel.

    Not ``lean``: everything is kept from forward to backward pass and the workspace grows as it may, to compare with.
    ``planned_outputs``: outputs lie in the program's own arena.
    """
    check_floats(lowered)
    module = to_kernel_ops(lowered)
    if lean:
        recomputed(module, end_of_forward(lowered, module))
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


def in_rows(lowered: LoweredGraph, artifact: Artifact) -> bytes | None:
    """Return the program of ``lowered`` with the updates of large state in blocks of rows (:mod:`.rows`), or None.

    None if there is no such state, or if it needs more memory than ``artifact``, or other places for its state.
    """
    if artifact.planned_outputs or not has_large_state(lowered):
        return None
    module = to_kernel_ops(lowered)
    divided = by_rows(lowered, module)
    if divided is None:
        return None
    recomputed(module, end_of_forward(divided, module))
    steps = steps_of(module)
    program = emit(module, steps, divided.inputs, divided.outputs, named=True)
    needs = planned_bytes(lowered, program, artifact.in_place)
    is_in_place = set(artifact.in_place) <= set(in_place(divided, module, steps))
    return program.model if is_in_place and needs <= artifact.planned_bytes else None


def rewritten_state(lowered: LoweredGraph) -> tuple[str, ...]:
    """Return the state of one form before and after the step. A caller that copies outputs may copy it over the old one."""
    return tuple(
        name
        for name, spec in lowered.outputs.items()
        if role_of(name) == "state" and name in lowered.inputs and _same_form(spec, lowered.inputs[name])
    )


def _same_form(one: TensorSpec, other: TensorSpec) -> bool:
    return (one.shape, one.dtype) == (other.shape, other.dtype)


def planned_bytes(lowered: LoweredGraph, program: EmittedProgram, written: Collection[str]) -> int:
    """Return the bytes over the idle process that one call needs: program, arena, XNNPACK's workspace, inputs and outputs.

    State that is not written in place has two arrays; an output that is planned and no state has its place and a copy.
    A checkpoint copies the tensors of the state one after the other.
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
