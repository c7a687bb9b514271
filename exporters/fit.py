"""Which submodels of a model fit a device, what each would cost it, and which one to take.

Memory is predicted from the graphs (:mod:`exporters.memory.predict`), all else is counted (:mod:`edgefl.submodels.cost`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, groupby, repeat
from typing import Any

import msgspec

from edgefl.contract.program import Function, Program
from edgefl.models.spec import ModelSpec
from edgefl.submodels.cost import cost, whole
from edgefl.submodels.importance.learnable import Liveness, liveness, own_weights
from edgefl.submodels.importance.submodel import Importance
from edgefl.submodels.sizes import Size, sizes
from edgefl.submodels.submodel import Submodel
from edgefl.system.forks import side_by_side
from edgefl.system.sizes import mebibytes
from edgefl.wire.errors import ModelError
from exporters.bundle.build import Prefix, batch_size
from exporters.capture.forked import begin
from exporters.device import Device
from exporters.memory.guess import guessed, next_traced, step_bytes
from exporters.memory.predict import predicted_peak
from exporters.memory.recompute import lean
from exporters.onnx import capture_for
from exporters.work import round_work

Functions = Callable[[Submodel], tuple[Program, Sequence[Prefix]]]
"""What a submodel's bundle would hold."""

Say = Callable[[str], None]

DEAD = "dead at the initial weights"


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """A submodel and what a round with it costs the device.

    Memory is anonymous memory above the idle agent at the peak of a round, predicted from the graph that needs most;
    ``memory_about``: guessed from other sizes, because it is far from what the device has. MACs are of one sample's forward
    pass through the trained part (``macs`` executed, ``kept_macs`` with weights that are held), ``round_macs`` of
    everything a round executes. Shares are of the whole model; ``trained_share`` is the geometric mean of the two.
    Seconds are those of the links and of the speed that are known, null if none is. ``problem`` is empty where it fits,
    ``dead`` where it can learn: else it says what invariant 31 of fiarse.md misses at the initial weights.
    """

    kind: str
    size: str
    options: dict[str, Any]
    memory_bytes: int
    memory_graph: str
    parameters: int
    parameter_share: float
    macs: int
    kept_macs: int
    mac_share: float
    prefix_macs: int
    round_macs: int
    download_bytes: int
    upload_bytes: int
    transfer_s: float | None
    compute_s: float | None
    trained_share: float
    problem: str = ""
    note: str = ""
    dead: str = ""
    memory_about: bool = False

    @property
    def too_much_memory(self) -> bool:
        return "memory" in self.problem

    @property
    def seconds(self) -> float:
        return (self.transfer_s or 0.0) + (self.compute_s or 0.0)


@dataclass(frozen=True, repr=False)
class Fit:
    """Every submodel that exists, in the order of the kinds, and the sizes that do not, with the reason. Printed, a line
    for each."""

    offers: tuple[Offer, ...]
    left_out: tuple[tuple[Size, ModelError], ...] = field(default=())

    @property
    def fitting(self) -> tuple[Offer, ...]:
        return tuple(offer for offer in self.offers if not offer.problem)

    @property
    def _able(self) -> tuple[Offer, ...]:
        return tuple(offer for offer in self.fitting if not offer.dead)

    def recommended(self) -> Offer:
        """The one that trains most of the model among those that fit; of equals the one that moves least bytes.

        "Most" is the geometric mean of the shares of parameters and of multiplications (with weights that are held):
        the first says how much of the model the device can change, the second how much of what the model computes
        takes part; either alone would favour a cut that trains the large last layers only, or the many positions of
        the first ones. One that is dead would train nothing, and is never taken. ModelError, with the smallest submodel
        and what it needs, if none is left.
        """
        if not self._able:
            raise _nothing_fits(self.offers)
        return max(self._able, key=_rank)

    def __repr__(self) -> str:
        return f"Fit({len(self.offers)} submodels, {len(self.fitting)} fit)"

    def __str__(self) -> str:
        lines = [
            f"{offer.kind}, {offer.size}: {offer.parameter_share:.1%} of the parameters, {mebibytes(offer.memory_bytes)}, "
            f"{offer.download_bytes:,} bytes down, {offer.upload_bytes:,} up; {offer.problem or offer.dead or 'fits'}"
            for offer in self.offers
        ]
        return "\n".join([*lines, f"recommended: {self.reason()}" if self._able else "nothing fits"])

    def reason(self) -> str:
        """Why :meth:`recommended` is."""
        best = self.recommended()
        others = sorted((offer for offer in self._able if offer is not best), key=_rank, reverse=True)
        summary = (
            f"{best.kind}, {best.size}: trains {best.parameter_share:.1%} of the parameters and "
            f"{best.mac_share:.1%} of the multiplications in {mebibytes(best.memory_bytes)}"
        )
        trains = " and train" if len(self._able) < len(self.fitting) else ""
        if not others:
            return f"{summary}; nothing else fits{trains and ' and trains'}"
        second = others[0]
        return (
            f"{summary}; of {len(self._able)} that fit{trains}, none trains more (next: {second.kind}, {second.size}, "
            f"with {second.parameter_share:.1%} and {second.mac_share:.1%})"
        )


def _rank(offer: Offer) -> tuple[float, int, int]:
    return round(offer.trained_share, 6), -(offer.download_bytes + offer.upload_bytes), -offer.memory_bytes


def plan(
    spec: ModelSpec,
    device: Device,
    functions: Functions,
    *,
    kinds: Iterable[str] = (),
    gammas: Sequence[float] = (),
    say: Say = lambda _: None,
    processes: int = 1,
) -> Fit:
    """All submodels of ``spec`` as the device would find them. Where it names its memory, sizes that are far from it are not
    traced (:mod:`exporters.memory.guess`): others take a second or two for each.

    ``processes``: how many are looked at side by side; all find the same. ModelError if no submodel exists at all, or for a
    gamma outside (0, 1]; ConfigError for an unknown kind.
    """
    planner = _Planner(spec, device, functions)
    every = sizes(spec, kinds, gammas)
    told = [(size, f"{spec.name}: {number} of {len(every)}: ") for number, size in enumerate(every, 1)]
    groups = [list(group) for _, group in groupby(told, lambda each: each[0].kind)]
    if not device.memory:
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
    while made._able and (best := made.recommended()).memory_about:
        exact = planner.offer(planner.sketch(Size(best.kind, best.options)))
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
    """A size and what it is; ``told``: what is said before its name."""

    size: Size
    submodel: Submodel
    program: Program
    forward: Sequence[Function]
    told: str


class _Planner:
    def __init__(self, spec: ModelSpec, device: Device, functions: Functions) -> None:
        self._spec, self._device, self._functions = spec, device, functions
        self._parameters, self._macs = whole(spec)
        self._known: dict[object, int] = {}

    def sketch(self, size: Size, told: str = "") -> _Sketch:
        submodel = size.of(self._spec)
        program, prefix = self._functions(submodel)
        return _Sketch(size, submodel, program, [part.forward for part in prefix], told)

    def offer_or_reason(self, sketch: _Sketch) -> Offer | ModelError:
        try:
            return self.offer(sketch)
        except ModelError as error:
            return error

    def offers(self, sketches: Sequence[_Sketch], say: Say) -> list[Offer]:
        """Of one kind. Without a limit all are traced; else those near it, and from the smallest on while finer chunks are
        better."""
        memory = self._device.memory
        bytes_of = [step_bytes(each.submodel, batch_size(each.program)) for each in sketches if memory]
        traced: dict[int, Offer] = {}
        peaks: dict[int, int] = {}

        def trace(at: int) -> Offer:
            say(f"{sketches[at].told}tracing {sketches[at].size.kind}, {sketches[at].size.label}")
            traced[at] = self.offer(sketches[at])
            peaks[at] = traced[at].memory_bytes
            return traced[at]

        if not memory or not sketches:
            return [trace(at) for at in range(len(sketches))]
        while (at := next_traced(bytes_of, peaks, memory)) is not None:
            trace(at)
        for at in reversed(range(len(sketches))):
            if (traced.get(at) or trace(at)).options == sketches[at].size.options:
                break
        about = map(_Peak, guessed(bytes_of, peaks), repeat("train"))
        return [
            traced.get(at) or self._offer(sketch, peak, about=True)
            for at, (sketch, peak) in enumerate(zip(sketches, about, strict=True))
        ]

    def offer(self, sketch: _Sketch) -> Offer:
        """With a trace of all that a round runs."""
        size, program = sketch.size, sketch.program
        forward = self._peak(size.kind, sketch.forward)
        steps = [phase.function for phase in program.phases]
        training = self._peak(size.kind, [program.start, *steps, program.finish])
        if size.finer and forward.bytes > training.bytes:
            return self.offer(self.sketch(size.finer))
        return self._offer(sketch, max(training, forward, key=lambda peak: peak.bytes))

    def _peak(self, kind: str, functions: Sequence[Function]) -> _Peak:
        """The most that one of them needs. Equal ports mean equal graphs, within a kind: traced once."""
        most = _Peak(0, "")
        for function in functions:
            key = (kind, function.name, tuple(function.inputs.items()))
            if key not in self._known:
                self._known[key] = predicted_peak(lean(capture_for(function)))
            most = max(most, _Peak(self._known[key], function.name), key=lambda peak: peak.bytes)
        return most

    def _offer(self, sketch: _Sketch, peak: _Peak, *, about: bool = False) -> Offer:
        size, submodel, program = sketch.size, sketch.submodel, sketch.program
        costs, device = cost(submodel), self._device
        work = round_work(program, costs, device.samples)
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


def _nothing_fits(offers: Sequence[Offer]) -> ModelError:
    """Names what is nearest to fitting: the quickest of those whose memory fits, else the smallest; none that is dead."""
    alive = [offer for offer in offers if not offer.dead]
    if not alive:
        return _all_dead(offers)
    candidates = [offer for offer in alive if not offer.too_much_memory]
    if candidates:
        wanted = min(candidates, key=lambda offer: offer.seconds)
        which = "quickest" if len(candidates) == len(alive) else "quickest whose memory fits"
        remedy = f"it needs {wanted.seconds:.1f} s per round: allow that, or faster links"
    else:
        wanted, which = min(alive, key=lambda offer: offer.memory_bytes), "smallest"
        remedy = "Give it that much, a smaller batch, or a smaller model"
    able = "" if len(alive) == len(offers) else " that would train"
    told = f"the {which}, {wanted.kind} with {wanted.size}, {wanted.problem}. {remedy}"
    values = {"memory_bytes": wanted.memory_bytes, "seconds": wanted.seconds}
    return ModelError(
        f"no submodel{able} fits the device: {told}", kind=wanted.kind, size=wanted.size, **values
    )


def _all_dead(offers: Sequence[Offer]) -> ModelError:
    largest = max(offers, key=_rank)
    return ModelError(
        f"no submodel would train: even {largest.kind} with {largest.size} is {DEAD}: {largest.dead}. "
        "Choose a larger gamma, or another kind",
        kind=largest.kind,
        size=largest.size,
    )
