"""Which form of a graph runs here: its own, or the fastest of its variants.

A graph with variants is tried where it is first needed, on the batch and the state that are at hand: each form runs the
same step, one that fails or gives something else than the graph's own form is dropped, and the others are timed. What
was found is kept for this graph, engine, number of threads and processor, so that no other round tries again.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import numpy as np

from device_runtime.engine.base import Engine, State
from device_runtime.host import processor
from device_runtime.memory import trim_memory
from edgefl.wire.blobs import BlobRef
from edgefl.wire.bundle.manifest import Graph
from edgefl.wire.bundle.variants import strays, unfolded
from edgefl.wire.errors import EdgeflError
from edgefl.wire.tensors import Array, Arrays

STEPS = 4
"""Timed steps of each form, behind the one whose outputs are compared; the quickest counts."""
WORTH = 0.97
"""A variant is taken where it needs at most this share of the time of the graph's own form."""


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """What a trial found. ``variant``: the form to run, "" for the graph's own. ``ms``: the quickest step of each form, its
    own as "". ``dropped``: those that cannot run here, and why."""

    variant: str = ""
    ms: dict[str, float] = {}
    dropped: dict[str, str] = {}


class Choices(Protocol):
    """Where choices live between processes."""

    def choice(self, key: str) -> bytes | None: ...

    def keep_choice(self, key: str, data: bytes) -> None: ...


class Blobs(Protocol):
    def get(self, ref: BlobRef) -> bytes: ...


@dataclass(frozen=True)
class Tuning:
    """What a device has to try forms with. ``memory_bytes``: of the process over its idle self; 0: what is known already is
    used, and nothing is tried."""

    choices: Choices
    threads: int = 1
    memory_bytes: int = 0

    def key(self, engine: Engine, graph: Graph) -> str:
        # Of the forms themselves: the graph travels compressed or not.
        forms = " ".join(variant.sha256 for variant in graph.variants)
        return f"{forms} {engine.name} {engine.version} {self.threads} {processor()}"

    def known(self, engine: Engine, graph: Graph) -> Choice | None:
        """What was found before; None for what this release cannot read."""
        data = self.choices.choice(self.key(engine, graph))
        try:
            return None if data is None else msgspec.msgpack.decode(data, type=Choice)
        except msgspec.MsgspecError:
            return None

    def allows(self, graph: Graph) -> bool:
        """Whether memory is known to have room for the graph, and for its state twice more."""
        state = sum(port.nbytes for port in graph.inputs_of("state"))
        return graph.planned_bytes > 0 and graph.planned_bytes + 2 * state <= self.memory_bytes


@dataclass
class Forms:
    """The forms in use during a round. ``used``: by graph, of those that have variants; ``dropped``: "graph/variant" and
    why."""

    engine: Engine
    blobs: Blobs
    tuning: Tuning | None = None
    used: dict[str, str] = field(default_factory=dict)
    dropped: dict[str, str] = field(default_factory=dict)

    def artifact(self, graph: Graph) -> bytes:
        """The bytes to load: of the form that was chosen, else the graph's own."""
        base = self.blobs.get(graph.blob)
        known = self.tuning.known(self.engine, graph) if self.tuning and graph.variants else None
        if known is None:
            return base
        self.used[graph.name] = known.variant
        self.dropped |= {f"{graph.name}/{name}": why for name, why in known.dropped.items()}
        chosen = [variant for variant in graph.variants if variant.name == known.variant]
        return unfolded(chosen[0], self.blobs.get(chosen[0].blob), base=base) if chosen else base

    def try_on(self, graph: Graph, feeds: Mapping[str, Array], state: State) -> None:
        """Choose, if there is something to choose from, nothing is known and memory allows it. ``state`` stays as it is."""
        if not graph.variants or self.tuning is None or not self.tuning.allows(graph):
            return
        if self.tuning.known(self.engine, graph) is None:
            found = fastest(self.engine, graph, self.blobs, feeds, state)
            self.tuning.choices.keep_choice(
                self.tuning.key(self.engine, graph), msgspec.msgpack.encode(found)
            )
            trim_memory()


def fastest(engine: Engine, graph: Graph, blobs: Blobs, feeds: Mapping[str, Array], state: State) -> Choice:
    """Run every form of ``graph`` from the same state; raises what its own form raises."""
    read = {port.name: state[port.name] for port in graph.inputs_of("state")}
    before = {name: np.array(array) for name, array in engine.read_state(read).items()}
    base = blobs.get(graph.blob)
    expected, own_ms = _run(engine, graph, base, feeds, before)
    ms, dropped = {"": own_ms}, {}
    for variant in graph.variants:
        try:
            model = unfolded(variant, blobs.get(variant.blob), base=base)
            found, taken = _run(engine, graph, model, feeds, before)
        except EdgeflError as error:
            dropped[variant.name] = str(error)
            continue
        except Exception as error:  # an engine's own, where one of its kernels fails
            dropped[variant.name] = f"{type(error).__name__}: {error}"
            continue
        if why := strays(found, expected, before):
            dropped[variant.name] = why
        else:
            ms[variant.name] = taken
    best = min(ms, key=ms.__getitem__)
    return Choice(variant=best if ms[best] <= WORTH * own_ms else "", ms=ms, dropped=dropped)


def _run(
    engine: Engine, graph: Graph, model: bytes, feeds: Mapping[str, Array], before: Arrays
) -> tuple[Arrays, float]:
    """(outputs of the first step, milliseconds of the quickest of those behind it)."""
    loaded = engine.load(graph, model)
    outputs = loaded.run(feeds, engine.write_state(before))
    state = outputs.state
    first = {name: np.array(array) for name, array in engine.read_state(state).items()} | outputs.arrays
    times = []
    for _ in range(STEPS):
        start = time.perf_counter()
        state = {**state, **loaded.run(feeds, state).state}
        times.append(1e3 * (time.perf_counter() - start))
    return first, round(min(times), 3)
