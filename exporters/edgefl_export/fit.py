"""Fit of a model's submodels to a device: the cost of each, and the recommended one.

Memory is predicted from the graphs (:mod:`edgefl_export.memory.predict`), all else is counted
(:mod:`edgefl.submodels.cost`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain, groupby, pairwise

import msgspec

from edgefl.contract.algorithm import Algorithm, Function, Phase
from edgefl.errors import ModelError
from edgefl.models.spec import ModelSpec
from edgefl.submodels.catalog import SubmodelSize, sizes
from edgefl.submodels.cost import ForwardCostCache, RoundCost, cost, model_cost
from edgefl.submodels.importance.learnable import LearnabilityReport, check_liveness, spec_arrays
from edgefl.submodels.importance.submodel import Importance
from edgefl.submodels.submodel import Submodel
from edgefl.system.forks import side_by_side
from edgefl.system.memory import without_collector
from edgefl.system.sizes import mebibytes
from edgefl_export.capture.graph import start_forked
from edgefl_export.compiler.algorithm import TrainingChoices
from edgefl_export.compiler.manifest import batch_size
from edgefl_export.compiler.request import TierTraining
from edgefl_export.device import Device
from edgefl_export.memory.recompute import lean_and_peak
from edgefl_export.offers import DEAD, Fit, SubmodelOffer
from edgefl_export.onnx.target import OnnxTarget

# Choice of the sizes of a submodel kind that are traced, if a device names its memory.
#
# Memory rises or falls with the size. So sizes between two traced ones on the same side of the device's memory are on that
# side too, unless a guess puts them near it. Between two on different sides the search continues at the size with the
# nearest guess. A guess follows :func:`step_bytes`, which needs a run without values and no graph::
#
#     while (at := next_traced(bytes_of_sizes, peaks, memory)) is not None:
#         peaks[at] = traced(at)

NEAR = 1.15
"""A guess this many times away from what a device has, up or down, is far."""

_WEIGHT_COPIES = 3
"""Weights, their gradients, and what the optimizer keeps of them."""


def step_bytes(submodel: Submodel, batch: int, forwards: ForwardCostCache) -> int:
    """Return a measure of a training step's memory in bytes, computed without a trace.

    It is the bytes of all results of a forward pass of ``batch`` rows through the trained units, plus three times the
    bytes of the weights (values, gradients, optimizer state). It grows with the real peak, which only a trace gives.
    """
    weights = sum(tensor.nbytes for tensor in submodel.suffix.parameters())
    return int(forwards.of(submodel.suffix, submodel.boundary).nbytes * batch) + _WEIGHT_COPIES * weights


def interpolate_peaks(sizes: Sequence[int], peaks: Mapping[int, int]) -> list[int]:
    """Return the peak memory of every size in bytes, interpolated where it was not traced.

    Args:
        sizes: :func:`step_bytes` of each size, in order; the interpolation is linear in it.
        peaks: traced peaks by index into ``sizes``; must contain the first and the last index.
    """
    guesses = dict(peaks)
    for before, after in pairwise(sorted(peaks)):
        for at in range(before + 1, after):
            guesses[at] = int(
                peaks[after] + _share(sizes, before, at, after) * (peaks[before] - peaks[after])
            )
    return [guesses[at] for at in range(len(sizes))]


def next_size(sizes: Sequence[int], peaks: Mapping[int, int], memory: int) -> int | None:
    """Return the index of the size to trace next, or None if enough sizes are traced.

    The first and the last size come first. Then come sizes between two traced ones of which only one fits into
    ``memory``, and last sizes with an interpolated peak near ``memory``.

    Args:
        sizes: :func:`step_bytes` of each size, in order.
        peaks: traced peaks in bytes by index into ``sizes``.
        memory: memory of the device in bytes.
    """
    for end in (0, len(sizes) - 1):
        if end not in peaks:
            return end
    guesses = interpolate_peaks(sizes, peaks)
    between = [
        at
        for before, after in pairwise(sorted(peaks))
        if (peaks[before] <= memory) != (peaks[after] <= memory)
        for at in range(before + 1, after)
    ]
    near = [
        at for at, guess in enumerate(guesses) if at not in peaks and memory / NEAR <= guess <= memory * NEAR
    ]
    return min(between or near, key=lambda at: abs(guesses[at] - memory), default=None)


def _share(sizes: Sequence[int], before: int, at: int, after: int) -> float:
    """Return the weight of index ``before`` when index ``at`` is interpolated: 1 at ``before``, 0 at ``after``."""
    if not (whole := sizes[before] - sizes[after]):
        return (after - at) / (after - before)
    return min(1.0, max(0.0, (sizes[at] - sizes[after]) / whole))


Training = Callable[[Submodel], TrainingChoices]
"""A user's function: the local training of a submodel, which may differ from size to size."""
Progress = Callable[[str], None]
"""A user's function, called with a line of text before each size."""


def plan(
    spec: ModelSpec,
    device: Device,
    training: Training,
    *,
    kinds: Iterable[str] = (),
    gammas: Sequence[float] = (),
    on_progress: Progress = lambda _: None,
    processes: int = 1,
) -> Fit:
    """Return every submodel of a model with the cost of a round on a device.

    A trace takes a second or two. If the memory of the device is known, only sizes near it are traced and the peaks of
    other sizes are interpolated (:func:`next_size`).

    Args:
        spec: the model.
        device: memory, links and speed of the device; 0 is unknown.
        training: function that returns the local training of a submodel; it may differ from size to size.
        kinds: kinds of submodels to consider; by default all.
        gammas: shares of the parameters that a submodel may hold, in (0, 1]; by default those of the paper.
        on_progress: called with a line of text before each size.
        processes: number of forked processes; the result does not depend on it.

    Raises:
        ModelError: if the model has no submodel, or for a gamma outside (0, 1].
        ConfigError: for an unknown kind.
    """
    planner = _SizePlanner(spec, device, training)
    every = sizes(spec, kinds, gammas)
    numbered = [(size, f"{spec.name}: {number} of {len(every)}: ") for number, size in enumerate(every, 1)]
    groups = [list(group) for _, group in groupby(numbered, lambda each: each[0].kind)]
    if device.memory:
        on_progress(f"{spec.name}: tracing the whole model")
        planner.trace_whole()
    else:
        groups = [[each] for each in numbered]
    tasks = [partial(_make_offers, planner, group) for group in groups]
    found = list(
        chain.from_iterable(side_by_side(tasks, on_progress, processes=processes, begin=start_forked))
    )
    offers = _distinct(each for each in found if isinstance(each, SubmodelOffer))
    left_out = [(size, each) for size, each in zip(every, found, strict=True) if isinstance(each, ModelError)]
    if not offers:
        raise left_out[0][1]
    return _trace_recommended(planner, Fit(tuple(offers), tuple(left_out)))


def _distinct(offers: Iterable[SubmodelOffer]) -> list[SubmodelOffer]:
    """Return ``offers`` without those of equal kind and cost as an earlier one; different options may give the same
    submodel.
    """
    first: dict[object, SubmodelOffer] = {}
    for offer in offers:
        cost = msgspec.structs.replace(offer, size="", options={}, memory_graph="", memory_about=False)
        first.setdefault(msgspec.json.encode(cost), offer)
    return list(first.values())


def _trace_recommended(planner: _SizePlanner, made: Fit) -> Fit:
    """Return ``made`` with an exact offer instead of the recommended one, if the memory of that was interpolated.

    The recommended size is traced, and again the next one if it does not fit after all.
    """
    while made.able and (best := made.recommended()).memory_about:
        size = SubmodelSize(best.kind, best.options)
        others = tuple(each for each in made.offers if each is not best)
        try:
            exact = planner.offer(planner.sketch(size))
        except ModelError as error:
            if not others:
                raise
            made = replace(made, offers=others, left_out=(*made.left_out, (size, error)))
        else:
            made = replace(made, offers=tuple(exact if each is best else each for each in made.offers))
    return made


def _make_offers(
    planner: _SizePlanner, sizes: Sequence[tuple[SubmodelSize, str]], on_progress: Progress
) -> list[SubmodelOffer | ModelError]:
    """Return for each size of one kind its offer (submodel and cost of a round), or the ModelError if no such submodel
    can be made.

    Args:
        planner: calculator of the offers.
        sizes: sizes of the same kind, each with a prefix for its lines of progress.
        on_progress: called with a line of text before each size.
    """
    found: list[_SizeDraft | ModelError] = []
    for size, label in sizes:
        on_progress(f"{label}{size.kind}, {size.label}")
        try:
            found.append(planner.sketch(size, label))
        except ModelError as error:
            if not 0.0 < size.options.get("gamma", 1.0) <= 1.0:
                raise
            found.append(error)
    sketches = [each for each in found if isinstance(each, _SizeDraft)]
    try:
        offers: Iterator[SubmodelOffer | ModelError] = iter(planner.offers(sketches, on_progress))
    except ModelError:  # of one of them: each alone shows which
        offers = map(planner.offer_or_reason, sketches)
    return [each if isinstance(each, ModelError) else next(offers) for each in found]


@dataclass(frozen=True)
class _Peak:
    """Peak memory in bytes above the idle agent, and the name of the graph that reaches it."""

    bytes: int
    graph: str


@dataclass(frozen=True)
class _SizeDraft:
    """One size with its submodel and cost, before its algorithm is built. ``label`` prefixes its lines of progress."""

    size: SubmodelSize
    submodel: Submodel
    cost: RoundCost
    choices: TrainingChoices
    label: str

    @cached_property
    def tier(self) -> TierTraining:
        """The tier, with its algorithm and frozen chunks. Building takes a second, so only a traced size needs it."""
        return TierTraining("", self.submodel, self.choices.build(self.submodel))


class _SizePlanner:
    """Calculator of the offers (submodels with the cost of a round) for the sizes of one model.

    It remembers the peak memory of every traced graph.
    """

    def __init__(self, spec: ModelSpec, device: Device, training: Training) -> None:
        self._spec, self._device, self._training = spec, device, training
        self._forwards = ForwardCostCache(spec)
        self._parameters, self._macs = model_cost(spec)
        self._known: dict[object, int] = {}

    def trace_whole(self) -> None:
        """Trace the whole model and remember its peaks, so that forked processes do not trace these graphs again.

        Each kind has a size with these graphs. A ModelError is ignored here; it comes again for each kind.
        """
        with suppress(ModelError):  # it is raised again for each kind
            self.offer(self.sketch(SubmodelSize("output_side", {"cut": 0})))

    def sketch(self, size: SubmodelSize, label: str = "") -> _SizeDraft:
        submodel = size.of(self._spec)
        return _SizeDraft(size, submodel, cost(submodel, self._forwards), self._training(submodel), label)

    def offer_or_reason(self, sketch: _SizeDraft) -> SubmodelOffer | ModelError:
        try:
            return self.offer(sketch)
        except ModelError as error:
            return error

    def offers(self, sketches: Sequence[_SizeDraft], on_progress: Progress) -> list[SubmodelOffer]:
        """Return the offers (submodels with the cost of a round) of ``sketches``, sizes of the same kind, in order.

        All are traced if the memory of the device is unknown, else only some (:meth:`_search`).
        """
        alike: dict[object, list[_SizeDraft]] = {}
        for sketch in sketches:
            # Memory falls with the size only among sizes of equal training.
            key = type(sketch.submodel.carrier), sketch.choices if self._device.memory else None
            alike.setdefault(key, []).append(sketch)
        offers = {
            id(sketch): offer
            for group in alike.values()
            for sketch, offer in self._search(group, on_progress)
        }
        return [offers[id(sketch)] for sketch in sketches]

    def _search(
        self, sketches: Sequence[_SizeDraft], on_progress: Progress
    ) -> list[tuple[_SizeDraft, SubmodelOffer]]:
        """Return (size, its offer) for each of ``sketches``, which all have the same training.

        Sizes near the memory of the device are traced, and so are the smallest ones for as long as a finer cut into
        chunks needs less memory. The memory of all others is interpolated.
        """
        memory = self._device.memory
        traced: dict[int, SubmodelOffer] = {}
        peaks: dict[int, int] = {}

        def trace(at: int) -> SubmodelOffer:
            on_progress(f"{sketches[at].label}tracing {sketches[at].size.kind}, {sketches[at].size.label}")
            traced[at] = self.offer(sketches[at])
            peaks[at] = traced[at].memory_bytes
            return traced[at]

        if not memory:
            return [(sketch, trace(at)) for at, sketch in enumerate(sketches)]
        algorithm = sketches[-1].tier.algorithm  # the search traces the last size in any case
        batch = batch_size(algorithm)
        bytes_of = [step_bytes(sketch.submodel, batch, self._forwards) for sketch in sketches]
        while (at := next_size(bytes_of, peaks, memory)) is not None:
            trace(at)
        for at in reversed(range(len(sketches))):
            if at in peaks and not sketches[at].size.finer:
                break
            if (traced.get(at) or trace(at)).options == sketches[at].size.options:
                break
        guesses = interpolate_peaks(bytes_of, peaks)
        return [
            (
                sketch,
                traced.get(at) or self._offer(sketch, algorithm, _Peak(guesses[at], "train"), about=True),
            )
            for at, sketch in enumerate(sketches)
        ]

    def offer(self, sketch: _SizeDraft) -> SubmodelOffer:
        """Trace all graphs that a round of this size runs and return its offer (the submodel and the cost of a round
        with it).

        If the frozen forward pass needs more memory than training, return the offer of a size with finer chunks
        instead.
        """
        size, algorithm, prefix = sketch.size, sketch.tier.algorithm, sketch.tier.prefix
        forward = self._peak(sketch, [chunk.forward for chunk in prefix])
        steps = [phase.function for phase in algorithm.phases]
        training = self._peak(sketch, [algorithm.start, *steps, algorithm.finish])
        if size.finer and forward.bytes > training.bytes:
            return self.offer(self.sketch(size.finer))
        return self._offer(sketch, algorithm, max(training, forward, key=lambda peak: peak.bytes))

    def _peak(self, sketch: _SizeDraft, functions: Sequence[Function]) -> _Peak:
        """Return the highest peak of the graphs of ``functions``, with the name of that function.

        Functions of equal name, training and ports have equal graphs, so each is traced once. Kinds whose tensors are
        transferred in a layout of their own (``carrier``) do not share traces with other kinds.
        """
        kind = sketch.size.kind if sketch.submodel.carrier else ""
        most = _Peak(0, "")
        for function in functions:
            key = (kind, sketch.choices, function.name, tuple(function.inputs.items()))
            if key not in self._known:
                with without_collector():
                    _, self._known[key] = lean_and_peak(OnnxTarget().capture(function))
            most = max(most, _Peak(self._known[key], function.name), key=lambda peak: peak.bytes)
        return most

    def _offer(
        self, sketch: _SizeDraft, algorithm: Algorithm, peak: _Peak, *, about: bool = False
    ) -> SubmodelOffer:
        size, submodel, costs, device = sketch.size, sketch.submodel, sketch.cost, self._device
        work = round_work(algorithm, costs, device.samples)
        transfer = (
            _seconds(costs.download_bytes, device.downlink),
            _seconds(costs.upload_bytes, device.uplink),
        )
        known = [seconds for seconds in transfer if seconds is not None]
        parameters, macs = costs.parameters / self._parameters, costs.kept_macs / max(1, self._macs)
        dead = _dead(self._spec, submodel)
        offer = SubmodelOffer(
            kind=size.kind,
            size=size.label,
            options=dict(size.options),
            memory_bytes=peak.bytes,
            memory_graph=peak.graph,
            parameters=costs.parameters,
            parameter_share=round(parameters, 6),
            macs=costs.macs,
            kept_macs=costs.kept_macs,
            mac_share=round(macs, 6),
            prefix_macs=costs.prefix_macs,
            round_macs=work,
            download_bytes=costs.download_bytes,
            upload_bytes=costs.upload_bytes,
            transfer_s=round(math.fsum(known), 3) if known else None,
            compute_s=_seconds(work, device.compute),
            trained_share=round(math.sqrt(parameters * macs), 6),
            note=_note(costs.macs, costs.kept_macs, dead),
            dead=dead,
            memory_about=about,
        )
        return msgspec.structs.replace(offer, problem=_problem(offer, device))


def _seconds(amount: float, rate: float) -> float | None:
    return round(amount / rate, 3) if rate else None


def _note(macs: int, kept: int, dead: str) -> str:
    notes: list[str] = []
    if kept < macs:
        share = f"{kept / macs:.0%} of the MACs count"
        notes.append(f"computes with zeros: memory and time are those of the whole width, {share}")
    if dead:
        notes.append(f"{DEAD}: {dead}")
    return "; ".join(notes)


def _dead(spec: ModelSpec, submodel: Submodel) -> str:
    """Return the reason why an importance submodel cannot learn from the initial weights.

    Return "" if it can learn, and for every other kind of submodel.
    """
    if not isinstance(submodel, Importance) or submodel.carrier is None:
        return ""
    verdict = check_liveness(spec, submodel.cut_of(spec_arrays(spec)))
    return "" if verdict.alive else _missing(verdict)


def _missing(found: LearnabilityReport) -> str:
    empty = f" ({', '.join(found.empty)} keep nothing)" if found.empty else ""
    if not found.keeps_classifier:
        return f"the classifier keeps no entry{empty}"
    if not found.reads_input:
        return f"its output does not depend on its input{empty}"
    return f"nothing before the classifier gets a gradient{empty}"


def _problem(offer: SubmodelOffer, device: Device) -> str:
    if device.memory and offer.memory_bytes > device.memory:
        about = "about " * offer.memory_about
        return f"needs {about}{mebibytes(offer.memory_bytes)} of memory, the device has {mebibytes(device.memory)}"
    if device.round_seconds and offer.seconds > device.round_seconds:
        return f"a round takes {offer.seconds:.1f} s, {device.round_seconds:g} s are allowed"
    return ""


def round_work(algorithm: Algorithm, cost: RoundCost, samples: int = 0) -> int:
    """Return the number of multiply-accumulates of a round on a device.

    A phase over the data counts as training on every row once, in whole batches, whatever its ``steps`` are.

    Args:
        algorithm: the local training.
        cost: costs of the submodel.
        samples: rows of data on the device; 0 for as many as the steps of a round draw.
    """
    drawn = batch_size(algorithm) * sum(phase.steps for phase in algorithm.phases if not phase.over_data)
    samples = samples or drawn
    passed = [_in_whole_batches(samples, phase) for phase in algorithm.phases if phase.over_data]
    return cost.round_macs(batch=1, steps=drawn + sum(passed), samples=samples)


def _in_whole_batches(samples: int, phase: Phase) -> int:
    """Return ``samples`` rounded up to whole batches of ``phase``, at least one batch."""
    inputs = phase.function.inputs.items()
    rows = next(spec.shape[0] for name, spec in inputs if name.startswith("batch.0."))
    return max(1, math.ceil(samples / rows)) * rows
