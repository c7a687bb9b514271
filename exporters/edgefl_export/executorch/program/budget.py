"""A program within a memory budget: what it plans is known, so that plans are tried until one fits."""

from __future__ import annotations

from edgefl_export.artifact import Artifact
from edgefl_export.capture.trace import Captured
from edgefl_export.executorch.program.write import LEAST_BYTES, to_executorch
from edgefl_export.memory import budget as search
from edgefl_export.memory.budget import Form, Measures
from edgefl_export.memory.recompute import Budget


def within(captured: Captured, budget: Budget, *, planned_outputs: bool = False) -> tuple[Artifact, int]:
    """The cheapest program that plans at most ``budget`` bytes over the idle process, and that budget in bytes.

    A relative budget is a share of what the program plans as it is. What is cheap is computed again with or without a budget
    (:mod:`.keep`); a budget adds products. It is not cut into segments: each would be a program that keeps an arena and
    XNNPACK's workspace of its own. Raises ExportError with the smallest number of bytes that was found if none fits.
    """
    last: list[tuple[Captured, Artifact]] = []

    def planned(form: Form) -> int:
        if not last or last[0][0] is not form[0]:  # to write a program takes seconds
            last[:] = [(form[0], to_executorch(form[0], planned_outputs=planned_outputs))]
        return last[0][1].planned_bytes

    count = _bytes(budget, planned((captured,)))
    found = search.within(captured, count, Measures(planned, pages=False))
    planned(found)
    return last[0][1], count


def _bytes(budget: Budget, plain: int) -> int:
    if not budget.relative:
        return int(budget.count)
    return max(LEAST_BYTES, int(budget.count * plain))  # no program takes less
