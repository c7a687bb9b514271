"""One search for all formats: the cheapest form of a step that a budget allows.

A form is the step as it is, with recomputation (:mod:`exporters.memory.recompute`), or with recomputation and cut into
segments that page (:mod:`exporters.memory.cutting`). What a form needs, only its format knows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from edgefl.contract.tensors import role_of
from edgefl.system.sizes import mebibytes, mebibytes_up
from edgefl.wire.errors import ExportError
from exporters.capture.trace import Captured
from exporters.memory.cutting import segments
from exporters.memory.paging import cuts
from exporters.memory.predict import predicted_peak
from exporters.memory.recompute import Budget, Plan, beside_tensors, lean, peak_bytes, plans
from exporters.memory.usage import size, timeline

Form = tuple[Captured, ...]
"""A step as the graphs that it runs one after another: itself, or its segments."""
Needed = Callable[[Form], int]
"""Bytes over the idle process that a device needs for a form."""

MARGIN = 1.1
"""How many times the prediction a budget has to have room for, where there is no bound beside it."""


@dataclass(frozen=True)
class Measures:
    """What a format knows of a form: ``safe`` bytes are enough for a device, about ``likely`` ones it will need (None: no
    better number), and ``least`` is a number that takes no time and that ``safe`` is never below. ``pages``: whether its
    engine runs segments. ``first`` makes the form of a step that no budget asks anything of."""

    safe: Needed
    likely: Needed | None = None
    least: Needed = lambda form: 0
    pages: bool = True
    first: Callable[[Captured], Captured] = lambda captured: captured


def within(captured: Captured, budget: int, measures: Measures) -> Form:
    """``captured`` in the cheapest form that needs at most ``budget`` bytes over the idle process.

    Recomputation alone comes first, by the safe measure and then by the likely one: paging wears the disk, and wants a
    device that knows segments. Raises ExportError with the smallest number of bytes that was found if none fits.
    """
    forms, found, passed = _Forms(captured, measures.first(captured)), list[int](), list[tuple[int, Form]]()
    passes = [(forms.recomputed(), measures.safe)]
    if measures.likely:
        passes.append((forms.recomputed(), measures.likely))
    if measures.pages:
        passes.append((forms.paged(), measures.likely or measures.safe))
    for tried, needed_by in passes:
        for form in tried:
            if needed_by is measures.safe and (least := measures.least(form)) > budget:
                passed.append((least, form))
                continue
            found.append(needed_by(form))
            if found[-1] <= budget:
                return form
    smallest = min(
        [*found, *(measures.safe(form) for _, form in sorted(passed, key=lambda each: each[0])[:1])]
    )
    means = "recomputation and paging" if measures.pages else "recomputation"
    without = mebibytes_up(measures.safe((forms.first,)))
    raise ExportError(
        f"function {captured.name!r} does not fit a memory budget of {mebibytes(budget)}: with all {means} it needs "
        f"{mebibytes_up(smallest)} over the idle process, {without} without. Give "
        "that much, a smaller batch, or a later cut",
        function=captured.name,
        budget=budget,
        smallest=smallest,
    )


def within_onnx(captured: Captured, budget: Budget) -> tuple[Form, int]:
    """:func:`within` for onnxruntime, and the budget in bytes.

    A share of the tensors is kept by the tensors; a number of bytes by the bound, or else by what is predicted, with a
    margin.
    """
    count = budget.of(captured)
    measures = Measures(needed, None if budget.relative else _predicted, _bound, first=lean)
    return within(captured, count, measures), count


def _predicted(form: Form) -> int:
    return int(MARGIN * predicted_peak(*form))


def needed(form: Form) -> int:
    """The bytes that a budget for ``form`` has to have: our bound, or what is predicted of onnxruntime if that is more,
    which does not compute all in place that could be."""
    return max(_bound(form), predicted_peak(*form))


def _bound(form: Form) -> int:
    if len(form) == 1:
        return peak_bytes(form[0])
    lines = [(each, timeline(each.module)) for each in form]
    own = max(line.peak - sum(_given(each).values()) for each, line in lines)
    given = {name: count for each in form for name, count in _given(each).items()}
    return own + sum(given.values()) + max(map(beside_tensors, form))


def _given(captured: Captured) -> dict[str, int]:
    """Bytes of what a segment reads of the step's inputs."""
    nodes = captured.module.graph.find_nodes(op="placeholder")
    named = zip(captured.inputs, nodes, strict=True)
    return {name: size(node) for name, node in named if role_of(name) != "page"}


class _Forms:
    """The forms of a step."""

    def __init__(self, captured: Captured, first: Captured) -> None:
        self._captured, self.first = captured, first
        self._plans: list[Plan] = []

    def recomputed(self) -> Iterator[Form]:
        """With recomputation alone, the cheapest one first."""
        yield (self.first,)
        yield from ((replace(self._captured, module=plan.module),) for plan in self._all())

    def paged(self) -> Iterator[Form]:
        """In segments, the cheapest one first, each holding less than all before it."""
        module = self._captured.module
        whole = Plan(module, timeline(module).peak, 0.0)
        choices = [
            (plan.cost + cut.cost, cut, plan)
            for plan in (whole, *self._all())
            for cut in cuts(timeline(plan.module))
        ]
        lowest = math.inf
        for _, cut, plan in sorted(choices, key=lambda choice: choice[0]):
            if cut.held < lowest:
                lowest = cut.held
                yield segments(replace(self._captured, module=plan.module), cut.places)

    def _all(self) -> list[Plan]:
        self._plans = self._plans or list(plans(self._captured))
        return self._plans
