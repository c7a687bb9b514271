"""The one place that talks to ExecuTorch's program format: captured graph in, bytes of a .pte out.

The program is written directly, not by ``executorch.exir``, which would trace the graph three times more: our order
of execution, our regions for XNNPACK (:mod:`.partition`, :mod:`exporters.executorch.xnnpack`), our arena
(:mod:`exporters.executorch.xnnpack.arena`). It has one method, ``forward``; inputs and outputs are those of the captured
function, in order, in memory that the caller gives. Equal functions give equal bytes.

A runtime's interface that only loads and executes, such as ExecuTorch's own for Android, has no way to give memory for
outputs. For it they are planned: they lie in the arena, and the caller copies them out after each call.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from edgefl.contract.tensors import TensorSpec, role_of
from exporters.artifact import Artifact
from exporters.capture.trace import Captured
from exporters.capture.unsupported import check_floats
from exporters.executorch.graph import lowered
from exporters.executorch.program.emit import Program, emit
from exporters.executorch.program.inplace import in_place
from exporters.executorch.program.keep import end_of_forward, recomputed
from exporters.executorch.program.missing import check
from exporters.executorch.program.partition import steps_of
from exporters.executorch.program.rows import by_rows, has_large_state
from exporters.sources.blob import program_nodes

LEAST_BYTES = 7_500_000
"""What a round takes however small its programs are."""
RUNTIME_BYTES = -950_000
"""What ExecuTorch, XNNPACK and a round around a program take, less what a device that trains has let go of: code that an
idle one has mapped (:mod:`device_runtime.libraries`)."""
VALUE_BYTES = 1500
"""What XNNPACK keeps about each value of a delegate and the node that makes it."""


def to_executorch(captured: Captured, *, lean: bool = True, planned_outputs: bool = False) -> Artifact:
    """``captured`` as a program of ExecuTorch 1.5. Raises ExportError naming the op, the module and the source line
    of an op without a kernel.

    Not ``lean``: everything is kept from forward to backward pass and the workspace grows as it may, to compare with.
    ``planned_outputs``: outputs lie in the program's own arena.
    """
    check_floats(captured)
    module = lowered(captured)
    if lean:
        recomputed(module, end_of_forward(captured, module))
    steps = steps_of(module)
    check(captured, module, steps)
    program = emit(
        module, steps, captured.inputs, captured.outputs, reserve=lean, planned_outputs=planned_outputs
    )
    written = rewritten_state(captured) if planned_outputs else in_place(captured, module, steps)
    nodes = program_nodes(captured, module.graph, program.instructions)
    return Artifact(
        program.model,
        planned_bytes(captured, program, written),
        written,
        nodes,
        planned_outputs=planned_outputs,
    )


def in_rows(captured: Captured, artifact: Artifact) -> bytes | None:
    """``artifact``, the program of ``captured``, with the updates of large state in blocks of rows (:mod:`.rows`).

    None where there are none, or it needs more memory than ``artifact``, or another place for state that this has in place.
    """
    if artifact.planned_outputs or not has_large_state(captured):
        return None
    module = lowered(captured)
    divided = by_rows(captured, module)
    if divided is None:
        return None
    recomputed(module, end_of_forward(divided, module))
    steps = steps_of(module)
    program = emit(module, steps, divided.inputs, divided.outputs, named=True)
    needs = planned_bytes(captured, program, artifact.in_place)
    is_in_place = set(artifact.in_place) <= set(in_place(divided, module, steps))
    return program.model if is_in_place and needs <= artifact.planned_bytes else None


def rewritten_state(captured: Captured) -> tuple[str, ...]:
    """State that is read and left in one form: a caller who copies outputs after the call may copy it over the old one."""
    return tuple(
        name
        for name, spec in captured.outputs.items()
        if role_of(name) == "state" and name in captured.inputs and _same_form(spec, captured.inputs[name])
    )


def _same_form(one: TensorSpec, other: TensorSpec) -> bool:
    return (one.shape, one.dtype) == (other.shape, other.dtype)


def planned_bytes(captured: Captured, program: Program, written: Collection[str]) -> int:
    """Bytes over the idle process that one call needs: its program, its arena, XNNPACK's workspace, inputs and outputs.

    State that is not written in place has two arrays; an output that is planned and no state has its place and a copy.
    """
    inputs = sum(_bytes(spec) for spec in captured.inputs.values())
    outputs = sum(_bytes(spec) for name, spec in captured.outputs.items() if name not in written)
    own = program.arena_bytes + program.workspace_bytes + len(program.model)
    needed = own + inputs + outputs + RUNTIME_BYTES + VALUE_BYTES * program.delegated_values
    # A device refuses a program whose arena is larger than what was told.
    return max(LEAST_BYTES, program.arena_bytes, needed)


def _bytes(spec: TensorSpec) -> int:
    return math.prod(spec.shape) * spec.dtype.itemsize
