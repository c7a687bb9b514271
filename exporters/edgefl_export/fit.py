"""Which submodels of a model fit a device, what each would cost it, and which one to take.

Memory is predicted from the graphs (:mod:`edgefl_export.memory.predict`), all else is counted
(:mod:`edgefl.submodels.cost`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain, groupby, repeat

import msgspec

from edgefl.contract.algorithm import Algorithm, Function
from edgefl.contract.choice import AlgorithmChoice
from edgefl.errors import ModelError
from edgefl.models.spec import ModelSpec
from edgefl.submodels.catalog import Size, sizes
from edgefl.submodels.cost import Forwards, RoundCost, cost, whole
from edgefl.submodels.importance.learnable import Liveness, liveness, own_weights
from edgefl.submodels.importance.submodel import Importance
from edgefl.submodels.submodel import Submodel
from edgefl.system.collecting import collecting_later
from edgefl.system.forks import side_by_side
from edgefl.system.sizes import mebibytes
from edgefl_export.bundle.build import Prefix, batch_size
from edgefl_export.capture.forked import begin
from edgefl_export.device import Device
from edgefl_export.memory.guess import guessed, next_traced, step_bytes
from edgefl_export.memory.recompute import lean_and_peak
from edgefl_export.offers import DEAD, Fit, Offer
from edgefl_export.onnx import capture_for
from edgefl_export.work import round_work

Functions = Callable[[Submodel, AlgorithmChoice], tuple[Algorithm, Sequence[Prefix]]]
"""Returns what the bundle of a submodel would hold with an algorithm."""

Choose = Callable[[Submodel], AlgorithmChoice]
Say = Callable[[str], None]


def plan(
    spec: ModelSpec,
    device: Device,
    choose: Choose,
    functions: Functions,
    *,
    kinds: Iterable[str] = (),
    gammas: Sequence[float] = (),
    say: Say = lambda _: None,
    processes: int = 1,
) -> Fit:
    """All submodels of ``spec`` as the device would find them. Where it names its memory, sizes that are far from it are not
    traced (:mod:`edgefl_export.memory.guess`): others take a second or two for each.

    ``choose`` returns the local training of a submodel. ``processes``: how many are looked at side by side; all find the
    same. ModelError if no submodel exists at all, or for a gamma outside (0, 1]; ConfigError for an unknown kind.
    """
    planner = _Planner(spec, device, choose, functions)
    every = sizes(spec, kinds, gammas)
    told = [(size, f"{spec.name}: {number} of {len(every)}: ") for number, size in enumerate(every, 1)]
    groups = [list(group) for _, group in groupby(told, lambda each: each[0].kind)]
    if device.memory:
        say(f"{spec.name}: tracing the whole model")
        planner.trace_whole()
    else:
        groups = [[each] for each in told]
    tasks = [partial(_offered, planner, group) for group in groups]
    found = list(chain.from_iterable(side_by_side(tasks, say, processes=processes, begin=begin)))
    offers = _distinct(each for each in found if isinstance(each, Offer))
    left_out = [(size, each) for size, each in zip(every, found, strict=True) if isinstance(each, ModelError)]
    if not offers:
        raise left_out[0][1]
    return _settled(planner, Fit(tuple(offers), tuple(left_out)))


def _distinct(offers: Iterable[Offer]) -> list[Offer]:
    """Return the first of each kind that costs and trains the same: a model has fewer sizes than there are options."""
    first: dict[object, Offer] = {}
    for offer in offers:
        cost = msgspec.structs.replace(offer, size="", options={}, memory_graph="", memory_about=False)
        first.setdefault(msgspec.json.encode(cost), offer)
    return list(first.values())


def _settled(planner: _Planner, made: Fit) -> Fit:
    """With a trace of the one that is recommended, and of the next one if that does not fit."""
    while made.able and (best := made.recommended()).memory_about:
        size = Size(best.kind, best.options)
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


def _offered(planner: _Planner, sizes: Sequence[tuple[Size, str]], say: Say) -> list[Offer | ModelError]:
    """The offers of the sizes of one kind, or why there are none; with what is said of each."""
    found: list[_Sketch | ModelError] = []
    for size, told in sizes:
        say(f"{told}{size.kind}, {size.label}")
        try:
            found.append(planner.sketch(size, told))
        except ModelError as error:
            if not 0.0 < size.options.get("gamma", 1.0) <= 1.0:
                raise
            found.append(error)
    sketches = [each for each in found if isinstance(each, _Sketch)]
    try:
        offers: Iterator[Offer | ModelError] = iter(planner.offers(sketches, say))
    except ModelError:  # of one of them: each by itself tells which
        offers = map(planner.offer_or_reason, sketches)
    return [each if isinstance(each, ModelError) else next(offers) for each in found]


@dataclass(frozen=True)
class _Peak:
    """Bytes above the idle agent, and the graph that needs them."""

    bytes: int
    graph: str


@dataclass(frozen=True)
class _Sketch:
    """A size, its submodel and cost. ``told``: what is said before its name."""

    size: Size
    submodel: Submodel
    cost: RoundCost
    choice: AlgorithmChoice
    functions: Functions
    told: str

    @cached_property
    def built(self) -> tuple[Algorithm, Sequence[Prefix]]:
        """The algorithm and the frozen chunks: built only for a size that is traced, because that takes a second."""
        return self.functions(self.submodel, self.choice)


class _Planner:
    def __init__(self, spec: ModelSpec, device: Device, choose: Choose, functions: Functions) -> None:
        self._spec, self._device, self._choose, self._functions = spec, device, choose, functions
        self._forwards = Forwards(spec)
        self._parameters, self._macs = whole(spec)
        self._known: dict[object, int] = {}

    def trace_whole(self) -> None:
        """Trace the whole model, before other processes look at its sizes: each kind has one with the same graphs."""
        with suppress(ModelError):  # it is raised again for each kind
            self.offer(self.sketch(Size("output_side", {"cut": 0})))

    def _algorithms(self, sketches: Sequence[_Sketch]) -> list[Algorithm]:
        """Return the algorithm of each, built once for those that are trained alike: for the last, which is traced."""
        trained = [(type(each.submodel.carrier), each.choice) for each in sketches]
        last = dict(zip(trained, sketches, strict=True))  # the search traces the last size in any case
        return [last[each].built[0] for each in trained]

    def sketch(self, size: Size, told: str = "") -> _Sketch:
        submodel = size.of(self._spec)
        costs = cost(submodel, self._forwards)
        return _Sketch(size, submodel, costs, self._choose(submodel), self._functions, told)

    def offer_or_reason(self, sketch: _Sketch) -> Offer | ModelError:
        try:
            return self.offer(sketch)
        except ModelError as error:
            return error

    def offers(self, sketches: Sequence[_Sketch], say: Say) -> list[Offer]:
        """Of one kind. Without a limit all are traced; else those near it, and from the smallest on while finer chunks are
        better."""
        memory = self._device.memory
        traced: dict[int, Offer] = {}
        peaks: dict[int, int] = {}

        def trace(at: int) -> Offer:
            say(f"{sketches[at].told}tracing {sketches[at].size.kind}, {sketches[at].size.label}")
            traced[at] = self.offer(sketches[at])
            peaks[at] = traced[at].memory_bytes
            return traced[at]

        if not memory or not sketches:
            return [trace(at) for at in range(len(sketches))]
        algorithms = self._algorithms(sketches)
        bytes_of = [
            step_bytes(sketch.submodel, batch_size(algorithm), self._forwards)
            for sketch, algorithm in zip(sketches, algorithms, strict=True)
        ]
        while (at := next_traced(bytes_of, peaks, memory)) is not None:
            trace(at)
        for at in reversed(range(len(sketches))):
            if at in peaks and not sketches[at].size.finer:
                break
            if (traced.get(at) or trace(at)).options == sketches[at].size.options:
                break
        about = map(_Peak, guessed(bytes_of, peaks), repeat("train"))
        return [
            traced.get(at) or self._offer(sketch, algorithm, peak, about=True)
            for at, (sketch, algorithm, peak) in enumerate(zip(sketches, algorithms, about, strict=True))
        ]

    def offer(self, sketch: _Sketch) -> Offer:
        """With a trace of all that a round runs."""
        size, (algorithm, prefix) = sketch.size, sketch.built
        kind = size.kind if sketch.submodel.carrier else ""
        forward = self._peak(kind, [part.forward for part in prefix])
        steps = [phase.function for phase in algorithm.phases]
        training = self._peak(kind, [algorithm.start, *steps, algorithm.finish])
        if size.finer and forward.bytes > training.bytes:
            return self.offer(self.sketch(size.finer))
        return self._offer(sketch, algorithm, max(training, forward, key=lambda peak: peak.bytes))

    def _peak(self, kind: str, functions: Sequence[Function]) -> _Peak:
        """Return the most that one of them needs. Equal ports mean equal graphs, which are traced once: within a kind whose
        tensors travel in another form, and among all other kinds."""
        most = _Peak(0, "")
        for function in functions:
            key = (kind, function.name, tuple(function.inputs.items()))
            if key not in self._known:
                with collecting_later():
                    _, self._known[key] = lean_and_peak(capture_for(function))
            most = max(most, _Peak(self._known[key], function.name), key=lambda peak: peak.bytes)
        return most

    def _offer(self, sketch: _Sketch, algorithm: Algorithm, peak: _Peak, *, about: bool = False) -> Offer:
        size, submodel, costs, device = sketch.size, sketch.submodel, sketch.cost, self._device
        work = round_work(algorithm, costs, device.samples)
        transfer = (
            _seconds(costs.download_bytes, device.downlink),
            _seconds(costs.upload_bytes, device.uplink),
        )
        known = [seconds for seconds in transfer if seconds is not None]
        parameters, macs = costs.parameters / self._parameters, costs.kept_macs / max(1, self._macs)
        dead = _dead(self._spec, submodel)
        offer = Offer(
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
    """Why single entries, chosen from the initial weights, cannot learn; empty where they can, and for other kinds."""
    if not isinstance(submodel, Importance) or submodel.carrier is None:
        return ""
    verdict = liveness(spec, submodel.cut_of(own_weights(spec)))
    return "" if verdict.alive else _missing(verdict)


def _missing(found: Liveness) -> str:
    empty = f" ({', '.join(found.empty)} keep nothing)" if found.empty else ""
    if not found.keeps_classifier:
        return f"the classifier keeps no entry{empty}"
    if not found.reads_input:
        return f"its output does not depend on its input{empty}"
    return f"nothing before the classifier gets a gradient{empty}"


def _problem(offer: Offer, device: Device) -> str:
    if device.memory and offer.memory_bytes > device.memory:
        about = "about " * offer.memory_about
        return f"needs {about}{mebibytes(offer.memory_bytes)} of memory, the device has {mebibytes(device.memory)}"
    if device.round_seconds and offer.seconds > device.round_seconds:
        return f"a round takes {offer.seconds:.1f} s, {device.round_seconds:g} s are allowed"
    return ""
