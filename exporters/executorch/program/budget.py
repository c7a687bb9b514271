"""A program within a memory budget: what it plans is known, so that forms of the step are written until one fits."""

from __future__ import annotations

from edgefl.system.sizes import mebibytes_up
from exporters.artifact import Artifact, in_segments
from exporters.capture.trace import Captured
from exporters.executorch.program.write import RUNTIME_BYTES, planned_together, to_executorch
from exporters.memory import budget as search
from exporters.memory.budget import Form, Measures
from exporters.memory.recompute import Budget
from exporters.sources.blob import graph_nodes


def within(captured: Captured, budget: Budget) -> tuple[Artifact, int]:
    """The cheapest program that plans at most ``budget`` bytes over the idle process, and that budget in bytes.

    A relative budget is a share of what the program plans as it is, ExecuTorch itself apart. What is cheap is computed
    again with or without a budget (:mod:`.keep`); a budget adds products, and then pages. Raises ExportError with the
    smallest number of bytes that was found if none fits.
    """
    written: list[Artifact] = []

    def planned(form: Form) -> int:
        written[:] = [artifact_of(captured, form)]
        return written[0].planned_bytes

    count = _bytes(budget, planned((captured,)))
    beside = f"; {mebibytes_up(RUNTIME_BYTES)} of it are for ExecuTorch itself"
    search.within(captured, count, Measures(planned, planned), beside)
    return written[0], count


def artifact_of(captured: Captured, form: Form) -> Artifact:
    """``form``, a form of ``captured``, as a program or as the programs of its segments."""
    if len(form) == 1:
        return to_executorch(form[0])
    artifacts = [to_executorch(each) for each in form]
    parts = [(each.inputs, each.outputs, made) for each, made in zip(form, artifacts, strict=True)]
    return in_segments(parts, planned_together(form, artifacts), graph_nodes(captured, captured.module.graph))


def _bytes(budget: Budget, plain: int) -> int:
    if not budget.relative:
        return int(budget.count)
    return int(budget.count * (plain - RUNTIME_BYTES)) + RUNTIME_BYTES
