"""Which form of a graph runs here, its own or the fastest of its variants, and with how many threads.

A step is tried where it is first needed, on the batch and the state that are at hand. :class:`SuitedForms` runs the form of
the processor once beside the graph's own. :class:`Tuning` runs each form; one that fails or gives something else than
the graph's own form is dropped, and the others are timed. The fastest is timed with fewer threads, too. What was found is
kept for these forms, engine, number of threads and processor, so that no other round tries again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, Protocol

import msgspec
import numpy as np

from edgefl.errors import BundleError
from edgefl.wire.blobs import BlobRef
from edgefl.wire.bundle.manifest import Graph
from edgefl.wire.bundle.variants import strays, unfolded
from edgefl.wire.limits import Limits
from edgefl.wire.mqtt.messages import MALFORMED
from edgefl.wire.tensors import Array, Arrays
from edgefl_device.engine.base import Engine, State
from edgefl_device.host import processor, processor_features
from edgefl_device.memory import trim_memory
from edgefl_device.round.suited import suited_form

STEPS, MOST_STEPS, TRIAL_MS = 4, 12, 500.0
"""Timed steps of each form, behind the one whose outputs are compared: the first number, and of short steps more until they
have taken that long, at the most the second. The quickest counts."""
WORTH = 0.97
"""A variant is taken where it needs at most this share of the time of the graph's own form."""
STEADY = 1.1
"""The graph's own form is timed before the variants and behind them. Further apart than this, the machine has changed in
between (another clock, other work, cores elsewhere), and all are timed again."""
UNCLEAR = 0.93, 0.99
"""Between these shares nothing is decided yet either: steps of a second or more are few, and their quickest varies by some
percent."""
QUICK_S = 10.0
"""A turn of fewer seconds is followed by a second one: a machine may be slow for as long as one form is timed."""
TURNS = 3
"""Turns at most. The quickest steps of those count in which the machine did not change, or of the last one."""
THREADS_WORTH = 0.9
"""More threads are taken where they bring a step to at most this share of its time: they cost energy."""
MORE = 1.1
"""What a variant may need of memory, as a multiple of what the graph's own form is planned to need."""
COPIES = 5
"""Of the state, that a trial holds beside a running step: before, after, of the own form, and what compares them."""
KILLED = "it ended the process that tried it"
FAILS = "the engine cannot run it"
DIFFERS = "it gives other results"
"""Reasons that the server gets. Figures and an engine's messages may hold values of the data, and stay here."""


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """What a trial found. ``variant``: the form to run, "" for the graph's own. ``ms``: the quickest step of each form, its
    own as "". ``dropped``: those that cannot run here, and why. ``threads``: those to run it with, 0 for the engine's own;
    ``threads_ms``: the quickest step of the form with each number that was tried. ``suited``: nothing was timed."""

    variant: str = ""
    ms: dict[str, float] = {}
    dropped: dict[str, str] = {}
    threads: int = 0
    threads_ms: dict[int, float] = {}
    suited: bool = False


class Choices(Protocol):
    """Where choices live between processes."""

    def choice(self, key: str) -> bytes | None: ...

    def keep_choice(self, key: str, data: bytes) -> None: ...


class Blobs(Protocol):
    def get(self, ref: BlobRef) -> bytes: ...


@dataclass(frozen=True)
class Tuning:
    """What a device has to try forms with. ``memory_bytes``: of the process over its idle self. ``limit_bytes``: of an
    artifact."""

    choices: Choices
    memory_bytes: int = 0
    limit_bytes: int = Limits().max_blob_bytes
    timed: ClassVar[bool] = True

    def key(self, engine: Engine, graph: Graph) -> str:
        # Of the forms themselves: the graph travels compressed or not.
        forms = " ".join(variant.sha256 for variant in graph.variants) or graph.blob.sha256
        return f"{forms} {engine.name} {engine.version} {engine.thread_counts[-1]} {processor()}"

    def known(self, engine: Engine, graph: Graph) -> Choice | None:
        """What was found before; None for what this release cannot read, and for what was not timed where that is done."""
        data = self.choices.choice(self.key(engine, graph))
        try:
            found = None if data is None else msgspec.msgpack.decode(data, type=Choice)
        except MALFORMED:
            return None
        return None if found and found.suited and self.timed else found

    def keep(self, engine: Engine, graph: Graph, choice: Choice) -> None:
        self.choices.keep_choice(self.key(engine, graph), msgspec.msgpack.encode(choice))

    def has_room(self, graph: Graph) -> bool:
        """Whether memory is known to have room for a variant of the graph."""
        return graph.planned_bytes > 0 and MORE * graph.planned_bytes <= self.memory_bytes

    def allows(self, graph: Graph) -> bool:
        """Whether memory is known to have room for a trial."""
        state = sum(port.nbytes for port in graph.inputs_of("state"))
        return self.has_room(graph) and MORE * graph.planned_bytes + COPIES * state <= self.memory_bytes

    def choose(
        self, engine: Engine, graph: Graph, blobs: Blobs, feeds: Mapping[str, Array], state: State
    ) -> None:
        """Choose a form by a trial on a batch, and keep it. ``state`` stays as it is."""
        trial(engine, graph, blobs, feeds, state, self)


class KeptHere(dict[str, bytes]):
    """Choices of one process."""

    def choice(self, key: str) -> bytes | None:
        """Return what was kept under ``key``, or None."""
        return self.get(key)

    def keep_choice(self, key: str, data: bytes) -> None:
        """Keep ``data`` under ``key``."""
        self[key] = data


@dataclass(frozen=True)
class SuitedForms(Tuning):
    """Takes the form that suits the processor, without a measurement: a variant is run once beside the graph's own form, and
    taken if it computes the same."""

    timed = False
    features: frozenset[str] = field(default_factory=processor_features)

    def choose(
        self, engine: Engine, graph: Graph, blobs: Blobs, feeds: Mapping[str, Array], state: State
    ) -> None:
        """Choose a form by the processor's instruction sets."""
        names = [variant.name for variant in graph.variants]
        form = suited_form(graph.format, names, self.features, engine.thread_counts[-1])
        listed = [variant for variant in graph.variants if variant.name == form]
        found: Choice | None = Choice()
        if listed:
            alone = msgspec.structs.replace(graph, variants=tuple(listed))
            # A form that ends the process is not run again by the next one.
            begins = partial(self.keep, engine, graph, Choice(dropped={form: KILLED}, suited=True))
            limit = self.limit_bytes
            found = fastest(engine, alone, blobs, feeds, state, limit=limit, begins=begins, timed=False)
        if found is not None:
            self.keep(engine, graph, msgspec.structs.replace(found, suited=True))


@dataclass
class Forms:
    """The forms in use during a round. ``used``: by graph, of those that have variants; ``dropped``: "graph/variant" and
    why."""

    engine: Engine
    blobs: Blobs
    tuning: Tuning | None = None
    used: dict[str, str] = field(default_factory=dict)
    dropped: dict[str, str] = field(default_factory=dict)

    def artifact(self, graph: Graph) -> tuple[bytes, int]:
        """The bytes to load, of the form that was chosen, else the graph's own; and its threads, 0 for the engine's."""
        base = self.blobs.get(graph.blob)
        known = self.tuning.known(self.engine, graph) if self.tuning else None
        if known is None or self.tuning is None:
            return base, 0
        return self._form(graph, known, base, self.tuning), known.threads

    def _form(self, graph: Graph, known: Choice, base: bytes, tuning: Tuning) -> bytes:
        if not graph.variants:
            return base
        self.used[graph.name] = ""
        fixed = (KILLED, FAILS, DIFFERS)  # an earlier release stored others
        self.dropped |= {
            f"{graph.name}/{name}": why if why in fixed else FAILS for name, why in known.dropped.items()
        }
        chosen = next((variant for variant in graph.variants if variant.name == known.variant), None)
        if chosen is None or not tuning.has_room(graph):
            return base
        frame = self.blobs.get(chosen.blob)
        try:
            model = unfolded(chosen, frame, base=base, limit=tuning.limit_bytes)
        except BundleError:
            self.dropped[f"{graph.name}/{chosen.name}"] = FAILS
            return base
        self.used[graph.name] = chosen.name
        return model

    def try_on(self, graph: Graph, feeds: Mapping[str, Array], state: State) -> None:
        """Choose, if there is something to choose from, nothing is known and memory allows it. ``state`` stays as it is."""
        tuning = self.tuning
        if tuning is None or not tuning.allows(graph):
            return
        if not graph.variants and len(self.engine.thread_counts) == 1:
            return
        if tuning.known(self.engine, graph) is None:
            tuning.choose(self.engine, graph, self.blobs, feeds, state)
            trim_memory()


def trial(
    engine: Engine, graph: Graph, blobs: Blobs, feeds: Mapping[str, Array], state: State, tuning: Tuning
) -> Choice | None:
    """:func:`fastest` and then :func:`with_threads`, each kept. None, and nothing is kept, where this step tells forms apart
    by nothing."""

    def begins() -> None:
        # A form that ends the process is not tried again by the next one.
        tuning.keep(engine, graph, Choice(dropped={each.name: KILLED for each in graph.variants}))

    found = fastest(engine, graph, blobs, feeds, state, limit=tuning.limit_bytes, begins=begins)
    if found is None:
        return None
    tuning.keep(engine, graph, found)
    if len(engine.thread_counts) > 1:
        found = with_threads(engine, graph, blobs, feeds, state, found, limit=tuning.limit_bytes)
        tuning.keep(engine, graph, found)
    return found


def fastest(
    engine: Engine,
    graph: Graph,
    blobs: Blobs,
    feeds: Mapping[str, Array],
    state: State,
    *,
    limit: int,
    begins: Callable[[], None] = lambda: None,
    timed: bool = True,
) -> Choice | None:
    """Run every form of ``graph`` from the same state, with the most threads, until the machine is as fast at the end as it
    was at the beginning, and the quickest is clearly worth it or not. ``begins`` is called before the first variant runs.
    Without ``timed`` each runs once, and the last variant that computes the same is taken.

    None where the graph's own form leaves the state as it is, or not finite: such a step says nothing about another form.
    Raises what its own form raises, and what fetching does.
    """
    before = _state_of(engine, graph, state)
    base = blobs.get(graph.blob)
    frames = [(variant, blobs.get(variant.blob)) for variant in graph.variants]
    most = engine.thread_counts[-1]
    expected, own_ms = _run(engine, graph, base, feeds, before, most, timed)
    if not _tells(expected, before):
        return None
    begins()
    dropped: dict[str, str] = {}
    steady: dict[str, float] = {}
    for number in range(TURNS):
        turn, start = {"": own_ms}, time.monotonic()
        for variant, frame in frames:
            if variant.name in dropped:
                continue
            try:
                model = unfolded(variant, frame, base=base, limit=limit)
                found, turn[variant.name] = _run(engine, graph, model, feeds, before, most, timed)
                why = DIFFERS if strays(found, expected, before) else ""
            except MemoryError:
                raise
            except Exception:  # an engine's own, where one of its kernels fails
                why = FAILS
            if why:
                dropped[variant.name] = why
                turn.pop(variant.name, None)
        if not timed:
            return Choice(variant=list(turn)[-1], dropped=dropped)
        if len(turn) == 1:
            break
        own_ms = _run(engine, graph, base, feeds, before, most, timed)[1]
        if max(turn[""], own_ms) > STEADY * min(turn[""], own_ms):
            continue
        turn[""] = min(turn[""], own_ms)
        steady = {name: min(each, steady.get(name, each)) for name, each in turn.items()}
        if is_clear(steady) and (number or time.monotonic() - start >= QUICK_S):
            break
    ms = {name: each for name, each in (steady or turn).items() if name not in dropped}
    best = min(ms, key=ms.__getitem__)
    return Choice(variant=best if ms[best] <= WORTH * ms[""] else "", ms=ms, dropped=dropped)


def is_clear(ms: Mapping[str, float]) -> bool:
    """Whether the quickest variant takes clearly more or less of the own form's time than it is taken for; ``ms``: as
    :class:`Choice` has it."""
    least, most = UNCLEAR
    share = min(each for name, each in ms.items() if name) / ms[""]
    return not least < share < most


def with_threads(
    engine: Engine,
    graph: Graph,
    blobs: Blobs,
    feeds: Mapping[str, Array],
    state: State,
    choice: Choice,
    *,
    limit: int,
) -> Choice:
    """``choice`` with the number of threads to run its form with. A number with which it cannot run is left out."""
    base = blobs.get(graph.blob)
    chosen = [
        unfolded(v, blobs.get(v.blob), base=base, limit=limit)
        for v in graph.variants
        if v.name == choice.variant
    ]
    model, before = next(iter(chosen), base), _state_of(engine, graph, state)
    *fewer, most = engine.thread_counts
    ms = {most: choice.ms[choice.variant]}
    for count in fewer:
        with suppress(Exception):  # an engine's own, where it has no room for more
            ms[count] = _run(engine, graph, model, feeds, before, count)[1]
    return msgspec.structs.replace(choice, threads=enough(ms), threads_ms=ms)


def _state_of(engine: Engine, graph: Graph, state: State) -> Arrays:
    """A copy of what the graph reads of the state."""
    read = {port.name: state[port.name] for port in graph.inputs_of("state")}
    return {name: np.array(array) for name, array in engine.read_state(read).items()}


def enough(ms: Mapping[int, float]) -> int:
    """The number of threads beyond which a step gains too little; ``ms``: its milliseconds with each number."""
    best, *more = sorted(ms)
    for count in more:
        if ms[count] <= THREADS_WORTH * ms[best]:
            best = count
    return best


def _tells(expected: Arrays, before: Arrays) -> bool:
    """Whether a step moved a matrix of the state, and all of it is finite."""
    matrices = [name for name in before if name in expected and expected[name].ndim >= 2]
    finite = all(np.isfinite(array).all() for array in expected.values() if array.dtype.kind == "f")
    return finite and any(not np.array_equal(expected[name], before[name]) for name in matrices)


def _run(
    engine: Engine,
    graph: Graph,
    model: bytes,
    feeds: Mapping[str, Array],
    before: Arrays,
    threads: int,
    timed: bool = True,
) -> tuple[Arrays, float]:
    """Return the outputs of the first step, and the milliseconds of the quickest of those behind it: 0 if not ``timed``."""
    loaded, state = engine.load(graph, model, threads), engine.write_state(before)
    outputs = loaded.run(feeds, state)
    first = {name: np.array(array) for name, array in engine.read_state(outputs.state).items()}
    first |= outputs.arrays
    state = {**state, **outputs.state}  # with what the step only reads
    times: list[float] = [] if timed else [0.0] * MOST_STEPS
    while len(times) < STEPS or (len(times) < MOST_STEPS and sum(times) < TRIAL_MS):
        start = time.perf_counter()
        state = {**state, **loaded.run(feeds, state).state}
        times.append(1e3 * (time.perf_counter() - start))
    return first, round(min(times), 3)
