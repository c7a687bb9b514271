"""Search for the cheapest form of a step that a memory budget allows, for all targets.

A form is the unchanged step, the step with recomputation (:mod:`edgefl_export.memory.recompute`), or the step with
recomputation and cut into segments that pass pages (:mod:`edgefl_export.memory.cutting`). Each format measures the memory
of a form itself (:class:`MemoryMeasure`).
"""

from __future__ import annotations

import math
import operator
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from torch import fx

from edgefl.contract.tensors import role_of
from edgefl.errors import ExportError
from edgefl.system.sizes import mebibytes, mebibytes_up
from edgefl_export.capture.graph import LoweredGraph
from edgefl_export.capture.nodes import results
from edgefl_export.memory.cutting import segments
from edgefl_export.memory.predict import predicted_peak
from edgefl_export.memory.recompute import Budget, RecomputedGraph, beside_tensors, lean, peak_bytes, plans
from edgefl_export.memory.usage import Timeline, constants, has_many, size, timeline, workspace

# Where to cut a step into segments: the cheapest cuts between which no more than so many bytes are held.
#
# A segment holds the pages that it reads and those that it makes until its end, and in between what begins and ends in
# it. The cuts are a shortest path over the places for a cut, as those of recomputation are
# (:mod:`edgefl_export.memory.recompute`); what a path costs is what it moves to the disk and back. POET (Patil et al.,
# "POET: Training Neural Networks on Tiny Devices with Integrated Rematerialization and Paging", arXiv 2207.07697) joins
# both in one linear program over single values; we join its two means in one search over plans of each.

BYTE_COST = 10.0
"""Cost of a byte to or from the disk, in operations of recomputation; a page is written once and read at least once."""
SEGMENT_COST = 5e6
"""Cost of an additional segment in the same unit."""
PLACES = 72
"""Number of places for a cut that are considered."""
SHARES = (0.8, 0.7, 0.6, 0.5, 0.45, 0.4, 0.35, 0.3, 0.27, 0.24, 0.21, 0.18, 0.16, 0.14, 0.12, 0.1)
"""Limits of a segment's memory that are tried, as shares of the bytes that the whole step holds at once."""

_Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class SegmentCuts:
    """Way to cut a step into segments: graphs that run one after another and pass values through files (pages).

    Attributes:
        places: positions after whose nodes the step is cut.
        held: largest number of bytes that a segment holds.
        cost: cost of segments and pages, in operations of recomputation.
    """

    places: tuple[int, ...]
    held: int
    cost: float


def cuts(line: Timeline) -> Iterator[SegmentCuts]:
    """Yield ways to cut a step, from the cheapest on; each holds less memory than the one before it."""
    table = _CutTable(line)
    whole = table.held[0, -1]
    least = math.inf
    for share in SHARES:
        found = table.cheapest(int(share * whole))
        if found is not None and found.held < least:
            least = found.held
            yield found


class _PageValues:
    """Values that may become pages (values that a segment leaves on disk for later ones), as arrays.

    It has the position, the size in bytes and the positions of the readers of each value.
    """

    def __init__(self, line: Timeline) -> None:
        fixed = constants(line)
        outputs = set(results(line.nodes[-1].graph))
        reads = _reads(line, fixed)
        nodes = [node for node in reads if node.op == "call_function" and node not in fixed]
        # One of several results is computed by the op of all of them.
        made_by = [node.all_input_nodes[0] if node.target is operator.getitem else node for node in nodes]
        self.made: _Numbers = np.array([line.position[made] for made in made_by], np.int64)
        self.sizes: _Numbers = np.array([size(node) for node in nodes], np.int64)
        self.last: _Numbers = np.array([max(reads[node]) for node in nodes], np.int64)
        self.reads = [sorted(reads[node]) for node in nodes]
        # State is bound and metrics are small: neither is a part of what a segment holds for itself.
        self.inside = np.array([node not in outputs for node in nodes], bool)
        # Bytes that each node needs beside its inputs and its result.
        busy = [workspace(node) if node.op == "call_function" else 0 for node in line.nodes]
        self.busy: _Numbers = np.array(busy, np.int64)

    def next_read(self, place: int) -> _Numbers:
        """Return for each value the first position after ``place`` that reads it, or the largest integer if none does."""
        far = np.iinfo(np.int64).max
        found = [(reads, bisect_right(reads, place)) for reads in self.reads]
        return np.array([reads[at] if at < len(reads) else far for reads, at in found], np.int64)


def _reads(line: Timeline, fixed: frozenset[fx.Node]) -> dict[fx.Node, list[int]]:
    """Return for each value its own position, followed by the positions of the nodes that read its memory.

    Views and the constants ``fixed`` are no readers, because each segment computes them again.
    """
    reads: dict[fx.Node, list[int]] = {
        node: [at] for at, node in enumerate(line.nodes) if line.owner[node] is node and not has_many(node)
    }
    for at, node in enumerate(line.nodes):
        again = node in fixed or line.owner[node] is not node
        if node.op == "call_function" and not again and node.target is not operator.getitem:
            for value in node.all_input_nodes:
                if line.owner[value] in reads:
                    reads[line.owner[value]].append(at)
    return reads


class _CutTable:
    """Table of the segments (parts of a step that run one after another) between every two places for a cut.

    For each it has the bytes that the segment holds (``held``) and the bytes of the values that it reads from and
    leaves in files.
    """

    def __init__(self, line: Timeline) -> None:
        self._values = _PageValues(line)
        self._places = _places(self._values, len(line.nodes))
        count = len(self._places)
        self.held = np.full((count, count), np.iinfo(np.int64).max, np.int64)
        self._moved = np.zeros((count, count), np.int64)
        for first, start in enumerate(self._places[:-1]):
            upcoming = self._values.next_read(start)
            for last in range(first + 1, count):
                self._fill(first, last, upcoming)

    def _fill(self, first: int, last: int, upcoming: _Numbers) -> None:
        values, start, end = self._values, self._places[first], self._places[last]
        read = int(values.sizes[(values.made <= start) & (upcoming <= end)].sum())
        here = (values.made > start) & (values.made <= end)
        left = int(values.sizes[here & (values.last > end)].sum())
        inside = here & (values.last <= end) & values.inside
        change = np.zeros(end - start + 2, np.int64)
        np.add.at(change, values.made[inside] - start, values.sizes[inside])
        np.add.at(change, values.last[inside] - start + 1, -values.sizes[inside])
        live = np.cumsum(change[:-1])[1:] + values.busy[start + 1 : end + 1]
        self.held[first, last] = read + left + int(live.max(initial=0))
        self._moved[first, last] = read + left

    def cheapest(self, limit: int) -> SegmentCuts | None:
        """Return the cheapest cuts of the step whose segments hold at most ``limit`` bytes each, or None if there are
        none.
        """
        costs = [0.0] + [math.inf] * (len(self._places) - 1)
        before = [0] * len(self._places)
        for last in range(1, len(self._places)):
            for first in range(last):
                cost = costs[first] + SEGMENT_COST + BYTE_COST * float(self._moved[first, last])
                if self.held[first, last] <= limit and cost < costs[last]:
                    costs[last], before[last] = cost, first
        if math.isinf(costs[-1]):
            return None
        path = [len(self._places) - 1]
        while path[-1]:
            path.append(before[path[-1]])
        path.reverse()
        held = max(int(self.held[first, last]) for first, last in pairwise(path))
        return SegmentCuts(tuple(self._places[at] for at in path[1:-1]), held, costs[-1])


def _places(values: _PageValues, count: int) -> list[int]:
    """Return the ascending places for a cut: both ends, and in each of :data:`PLACES` parts the place with fewest bytes.

    These are the bytes of the values that are computed before the place and read after it.
    """
    change, busy = np.zeros(count + 1, np.int64), np.ones(count, np.int64)
    for at, sign in ((values.made, 1), (values.last, -1)):
        np.add.at(change, at, sign * values.sizes)
        np.add.at(busy, at, values.sizes)
    crossing, done = np.cumsum(change)[:-1], np.cumsum(busy)
    edges = np.searchsorted(done, np.linspace(0, done[-1], PLACES + 1))
    inner = [int(a + np.argmin(crossing[a:b])) for a, b in pairwise(edges) if b > a]
    return sorted({-1, *inner, count - 1})


Form = tuple[LoweredGraph, ...]
"""Graphs that a step runs one after another: one graph, or its segments."""
MARGIN = 1.1
"""Factor on the prediction that a budget must suffice for if the bound exceeds the budget."""


class MemoryMeasure(ABC):
    """Interface to measure the memory that a device needs for a form of a step: one graph, or its segments in order.

    Attributes:
        pages: the engine can run segments.
        estimates: :meth:`likely` differs from :meth:`safe`.
    """

    pages = True
    estimates = False

    @abstractmethod
    def safe(self, form: Form) -> int:
        """Return a number of bytes above the idle process that is certainly enough for ``form``: one graph, or its
        segments in order.
        """

    def likely(self, form: Form) -> int:
        """Return the estimated number of bytes above the idle process; by default that of :meth:`safe`."""
        return self.safe(form)

    def least(self, form: Form) -> int:
        """Return a lower bound of :meth:`safe` that is quick to compute."""
        return 0

    def first(self, lowered: LoweredGraph) -> LoweredGraph:
        """Return the graph that is compiled for a step without a budget."""
        return lowered


def fit_budget(lowered: LoweredGraph, budget: int, measure: MemoryMeasure) -> Form:
    """Return the cheapest form of a step (one graph, or its segments in order) that fits a memory budget.

    Forms with recomputation alone are tried first, by the safe measure and then by the likely one. Forms with segments
    come last, because pages wear the disk and older devices cannot run segments.

    Args:
        lowered: graph of the step.
        budget: bytes above the idle process.
        measure: memory of a form in the format to write.

    Raises:
        ExportError: if no form fits; the detail ``smallest`` is the smallest number of bytes that was found.
    """
    forms, found, passed = _StepForms(lowered, measure.first(lowered)), list[int](), list[tuple[int, Form]]()
    passes = [(forms.recomputed(), False)]
    if measure.estimates:
        passes.append((forms.recomputed(), True))
    if measure.pages:
        passes.append((forms.paged(), measure.estimates))
    for tried, estimated in passes:
        for form in tried:
            if not estimated and (least := measure.least(form)) > budget:
                passed.append((least, form))
                continue
            found.append(measure.likely(form) if estimated else measure.safe(form))
            if found[-1] <= budget:
                return form
    smallest = min(
        [*found, *(measure.safe(form) for _, form in sorted(passed, key=lambda each: each[0])[:1])]
    )
    means = "recomputation and paging" if measure.pages else "recomputation"
    without = mebibytes_up(measure.safe((forms.first,)))
    raise ExportError(
        f"function {lowered.name!r} does not fit a memory budget of {mebibytes(budget)}: with all {means} it needs "
        f"{mebibytes_up(smallest)} over the idle process, {without} without. Give "
        "that much, a smaller batch, or a later cut",
        function=lowered.name,
        budget=budget,
        smallest=smallest,
    )


def within_onnx(lowered: LoweredGraph, budget: Budget) -> tuple[Form, int]:
    """Return (cheapest form for onnxruntime that fits the budget, budget in bytes). A form is one graph, or its
    segments.

    A relative budget is compared with the bound alone. A budget in bytes is compared with the bound and, if no form
    fits by that, with the prediction times :data:`MARGIN`.

    Raises:
        ExportError: if no form fits (:func:`fit_budget`).
    """
    count = budget.of(lowered)
    return fit_budget(lowered, count, OnnxMemory(estimates=not budget.relative)), count


class OnnxMemory(MemoryMeasure):
    """Measure of the memory that onnxruntime needs for a step, which is one graph or cut into segments.

    ``estimates``: :meth:`likely` predicts the peak; otherwise only the bound :meth:`safe` is used.
    """

    def __init__(self, *, estimates: bool) -> None:
        self.estimates = estimates

    def safe(self, form: Form) -> int:
        return needed_bytes(form)

    def likely(self, form: Form) -> int:
        return int(MARGIN * predicted_peak(*form))

    def least(self, form: Form) -> int:
        return _bound(form)

    def first(self, lowered: LoweredGraph) -> LoweredGraph:
        return lean(lowered)


def needed_bytes(form: Form) -> int:
    """Return the bytes that a budget must have for ``form`` (one graph, or its segments): the bound or the predicted
    peak, whichever is higher.
    """
    return max(_bound(form), predicted_peak(*form))


def _bound(form: Form) -> int:
    if len(form) == 1:
        return peak_bytes(form[0])
    lines = [(each, timeline(each.module)) for each in form]
    own = max(line.peak - sum(_input_bytes(each).values()) for each, line in lines)
    given = {name: count for each in form for name, count in _input_bytes(each).items()}
    return own + sum(given.values()) + max(map(beside_tensors, form))


def _input_bytes(lowered: LoweredGraph) -> dict[str, int]:
    """Return the bytes of the inputs of a graph by name, without values that earlier segments left in files (pages)."""
    nodes = lowered.module.graph.find_nodes(op="placeholder")
    named = zip(lowered.inputs, nodes, strict=True)
    return {name: size(node) for name, node in named if role_of(name) != "page"}


class _StepForms:
    """Generator of the forms of a step: the unchanged step, steps with recomputation, and steps cut into segments.

    A segment is a part of the step that runs as a graph of its own. Recomputation plans are made once.
    """

    def __init__(self, lowered: LoweredGraph, first: LoweredGraph) -> None:
        self._lowered, self.first = lowered, first
        self._plans: list[RecomputedGraph] = []

    def recomputed(self) -> Iterator[Form]:
        """Yield forms with recomputation alone, the cheapest one first; the first is the step without a budget."""
        yield (self.first,)
        yield from ((replace(self._lowered, module=plan.module),) for plan in self._all())

    def paged(self) -> Iterator[Form]:
        """Yield forms in segments, the cheapest one first; each holds less memory than all before it."""
        module = self._lowered.module
        whole = RecomputedGraph(module, timeline(module).peak, 0.0)
        choices = [
            (plan.cost + cut.cost, cut, plan)
            for plan in (whole, *self._all())
            for cut in cuts(timeline(plan.module))
        ]
        lowest = math.inf
        for _, cut, plan in sorted(choices, key=lambda choice: choice[0]):
            if cut.held < lowest:
                lowest = cut.held
                yield segments(replace(self._lowered, module=plan.module), cut.places)

    def _all(self) -> list[RecomputedGraph]:
        self._plans = self._plans or list(plans(self._lowered))
        return self._plans
