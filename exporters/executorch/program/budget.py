"""A program within a memory budget: what it plans is known, so that plans are tried until one fits."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from edgefl.system.sizes import mebibytes, mebibytes_up
from edgefl.wire.errors import ExportError
from exporters.artifact import Artifact
from exporters.capture.trace import Captured
from exporters.executorch.program.write import RUNTIME_BYTES, to_executorch
from exporters.memory.recompute import Budget, leaner


def within(captured: Captured, budget: Budget) -> tuple[Artifact, int]:
    """The cheapest program that plans at most ``budget`` bytes over the idle process, and that budget in bytes.

    A relative budget is a share of what the program plans as it is, ExecuTorch itself apart. What is cheap is computed
    again with or without a budget (:mod:`.keep`); a budget adds products. Raises ExportError with the smallest number
    of bytes that was found if none fits.
    """
    plain = to_executorch(captured)
    count = _bytes(budget, plain)
    smallest = plain.planned_bytes
    for artifact in chain([plain], _leaner(captured)):
        if artifact.planned_bytes <= count:
            return artifact, count
        smallest = min(smallest, artifact.planned_bytes)
    raise ExportError(
        f"function {captured.name!r} does not fit a memory budget of {mebibytes(count)}: with all recomputation it "
        f"needs {mebibytes_up(smallest)} over the idle process, {mebibytes_up(plain.planned_bytes)} without; "
        f"{mebibytes_up(RUNTIME_BYTES)} of it are for ExecuTorch itself. Give that much, a smaller batch, or a later cut",
        function=captured.name,
        budget=count,
        smallest=smallest,
    )


def _bytes(budget: Budget, plain: Artifact) -> int:
    if not budget.relative:
        return int(budget.count)
    return int(budget.count * (plain.planned_bytes - RUNTIME_BYTES)) + RUNTIME_BYTES


def _leaner(captured: Captured) -> Iterator[Artifact]:
    return (to_executorch(plan) for plan in leaner(captured))
