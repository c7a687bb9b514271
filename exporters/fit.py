"""Which submodels of a model fit a device, what each would cost it, and which one to take.

Memory is predicted from the graphs (:mod:`exporters.memory.predict`), all else is counted (:mod:`edgefl.submodels.cost`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from edgefl.contract.program import Function, Phase, Program
from edgefl.models.spec import ModelSpec
from edgefl.submodels.cost import Cost, cost, whole
from edgefl.submodels.importance.learnable import Liveness, liveness, own_weights
from edgefl.submodels.importance.submodel import Importance
from edgefl.submodels.sizes import Size, sizes
from edgefl.submodels.submodel import Submodel
from edgefl.system.forks import side_by_side
from edgefl.system.sizes import mebibytes, parse_rate, parse_size
from edgefl.wire.errors import ConfigError, ModelError
from exporters.bundle.build import Prefix, batch_size
from exporters.capture.forked import begin
from exporters.memory.predict import predicted_peak
from exporters.memory.recompute import lean
from exporters.onnx import capture_for

Functions = Callable[[Submodel], tuple[Program, Sequence[Prefix]]]
"""What a submodel's bundle would hold."""

DEAD = "dead at the initial weights"


@dataclass(frozen=True, init=False)
class Device:
    """What a device offers. 0 is unknown, or no limit.

    ``memory`` is in bytes over its idle process, or like ``"64MiB"``; ``downlink`` and ``uplink`` in bytes per second, or
    like ``"1MB/s"`` and ``"8Mbit/s"``; ``compute`` in MACs per second, and ``round_seconds`` is what a round may take.
    ``samples`` is how many rows it has; 0: as many as a round's steps read. ConfigError for a text that is no size or rate.

    >>> edgefl.Device(memory="64MiB", uplink="8Mbit/s")
    Device(memory=67108864, downlink=0.0, uplink=1000000.0, compute=0.0, round_seconds=0.0, samples=0)
    """

    memory: int
    downlink: float
    uplink: float
    compute: float
    round_seconds: float
    samples: int

    def __init__(
        self,
        memory: int | str = 0,
        downlink: float | str = 0.0,
        uplink: float | str = 0.0,
        compute: float = 0.0,
        round_seconds: float = 0.0,
        samples: int = 0,
    ) -> None:
        values = {
            "memory": _read("memory", memory, parse_size),
            "downlink": _read("downlink", downlink, parse_rate),
            "uplink": _read("uplink", uplink, parse_rate),
            "compute": compute,
            "round_seconds": round_seconds,
            "samples": samples,
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)


def _read(name: str, value: float | str, parse: Callable[[str], float]) -> float:
    """A number as it is; ConfigError, naming the argument, for a text that ``parse`` refuses."""
    try:
        return parse(value) if isinstance(value, str) else value
    except ValueError as error:
        raise ConfigError(f"argument `{name}`: {error}", argument=name) from error


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """A submodel and what a round with it costs the device.

    Memory is the predicted peak over the idle process, of the graph that needs most. MACs are of one sample's forward
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
    say: Callable[[str], None] = lambda _: None,
    processes: int = 1,
) -> Fit:
    """All submodels of ``spec`` as the device would find them. Some seconds for each graph, which is traced.

    ``processes``: how many sizes are looked at side by side; all find the same. ModelError if no submodel exists at all, or
    for a gamma outside (0, 1]; ConfigError for an unknown kind.
    """
    planner = _Planner(spec, device, functions)
    offers: list[Offer] = []
    left_out: list[tuple[Size, ModelError]] = []
    every = sizes(spec, kinds, gammas)
    tasks = [
        partial(_offered, planner, size, f"{spec.name}: {number} of {len(every)}: {size.kind}, {size.label}")
        for number, size in enumerate(every, 1)
    ]
    found = side_by_side(tasks, say, processes=processes, begin=begin)
    for size, offer in zip(every, found, strict=True):
        if isinstance(offer, ModelError):
            left_out.append((size, offer))
        else:
            offers.append(offer)
    if not offers:
        raise left_out[0][1]
    return Fit(tuple(offers), tuple(left_out))


def _offered(planner: _Planner, size: Size, told: str, say: Callable[[str], None]) -> Offer | ModelError:
    """The offer of a size, or why there is none."""
    say(told)
    try:
        return planner.offer(size)
    except ModelError as error:
        if not 0.0 < size.options.get("gamma", 1.0) <= 1.0:
            raise
        return error


@dataclass(frozen=True)
class _Peak:
    """Bytes over the idle process, and the graph that needs them."""

    bytes: int
    graph: str


class _Planner:
    def __init__(self, spec: ModelSpec, device: Device, functions: Functions) -> None:
        self._spec, self._device, self._functions = spec, device, functions
        self._parameters, self._macs = whole(spec)
        self._known: dict[object, int] = {}

    def offer(self, size: Size) -> Offer:
        submodel = size.of(self._spec)
        program, prefix = self._functions(submodel)
        forward = self._peak(size.kind, [part.forward for part in prefix])
        steps = [phase.function for phase in program.phases]
        training = self._peak(size.kind, [program.start, *steps, program.finish])
        if size.finer and forward.bytes > training.bytes:
            return self.offer(size.finer)
        return self._offer(size, submodel, program, max(training, forward, key=lambda peak: peak.bytes))

    def _peak(self, kind: str, functions: Sequence[Function]) -> _Peak:
        """The most that one of them needs. Equal ports mean equal graphs, within a kind: traced once."""
        most = _Peak(0, "")
        for function in functions:
            key = (kind, function.name, tuple(function.inputs.items()))
            if key not in self._known:
                self._known[key] = predicted_peak(lean(capture_for(function)))
            most = max(most, _Peak(self._known[key], function.name), key=lambda peak: peak.bytes)
        return most

    def _offer(self, size: Size, submodel: Submodel, program: Program, peak: _Peak) -> Offer:
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
        )
        return msgspec.structs.replace(offer, problem=_problem(offer, device))


def round_work(program: Program, found: Cost, samples: int = 0) -> int:
    """Multiplications of a round on ``samples`` rows; 0: as many as the round's steps draw.

    A phase over the data counts as training on every row once, in whole batches, whatever its ``steps`` say.
    """
    rows = batch_size(program) * sum(phase.steps for phase in program.phases if not phase.over_data)
    samples = samples or rows
    passed = [_in_whole_batches(samples, phase) for phase in program.phases if phase.over_data]
    return found.round_macs(batch=1, steps=rows + sum(passed), samples=samples)


def _in_whole_batches(samples: int, phase: Phase) -> int:
    """The rows of one pass: the last batch is filled up, and there is one at least."""
    rows = next(spec.shape[0] for name, spec in phase.function.inputs.items() if name.startswith("batch.0."))
    return max(1, math.ceil(samples / rows)) * rows


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
        return f"needs {mebibytes(offer.memory_bytes)} of memory, the device has {mebibytes(device.memory)}"
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
    return ModelError(
        f"no submodel{able} fits the device: the {which}, {wanted.kind} with {wanted.size}, {wanted.problem}. {remedy}",
        kind=wanted.kind,
        size=wanted.size,
        memory_bytes=wanted.memory_bytes,
        seconds=wanted.seconds,
    )


def _all_dead(offers: Sequence[Offer]) -> ModelError:
    largest = max(offers, key=_rank)
    return ModelError(
        f"no submodel would train: even {largest.kind} with {largest.size} is {DEAD}: {largest.dead}. "
        "Choose a larger gamma, or another kind",
        kind=largest.kind,
        size=largest.size,
    )
