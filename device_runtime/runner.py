"""One round on the device, for any manifest.

::

    prefix: per chunk fetch its units, run forward over the local data, write the record, drop the units
    weights of the suffix, carry -> start -> state
    per phase, per step: state, batch, data, noise, hyper -> state, metrics
    weights of the suffix, carry, state -> finish -> update, carry, metrics

The runner knows graphs, roles and ports, and no method by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from device_runtime import data as local_data
from device_runtime.checkpoint import Checkpoint
from device_runtime.data import Batches, FittedData
from device_runtime.engine.base import Engine, LoadedGraph, State
from device_runtime.forward import MultiStepForward, record_tag
from device_runtime.graphs import Blobs, Graphs, Memory, Settings, Step, check_port, labelled
from device_runtime.job import Job
from device_runtime.memory import trim_memory
from device_runtime.profiler import Profiler
from device_runtime.record import Record
from edgefl.wire.errors import BundleError
from edgefl.wire.manifest import Graph, Manifest, Port
from edgefl.wire.tensors import Array, Arrays


@dataclass(frozen=True)
class RoundResult:
    """What a round produced. ``masks``: those of the update that are packed bits. ``metrics``: means over the steps,
    and those of ``finish`` as they are."""

    update: Arrays
    masks: dict[str, int]
    carry: Arrays
    metrics: dict[str, float]
    samples: int


@dataclass(frozen=True)
class _Round:
    """What every step of a round reads."""

    job: Job
    data: FittedData
    record: Record | None
    batches: Batches
    hyper: Mapping[str, float]
    facts: Mapping[str, Array]


class RoundRunner:
    """Runs one :class:`Job`. Killed and run again with the same memory, it goes on where it was."""

    def __init__(
        self,
        *,
        engine: Engine,
        manifest: Manifest,
        blobs: Blobs,
        memory: Memory,
        profiler: Profiler,
        settings: Settings,
    ) -> None:
        self._engine = engine
        self._manifest = manifest
        self._memory = memory
        self._profiler = profiler
        self._settings = settings
        self._graphs = Graphs(engine, manifest, blobs, profiler)
        self._forward = MultiStepForward(self._graphs, manifest, profiler, settings)

    @property
    def graphs(self) -> Graphs:
        """The graphs and weights in use; its ``residency`` tells what was ever in memory."""
        return self._graphs

    def run(self, job: Job, data: FittedData, carry: Arrays) -> RoundResult:
        """The whole round. RoundAborted if it ended meanwhile; BundleError if graphs, blobs and ports disagree."""
        data = data.first(job.samples)
        record = self._forward.record(job, data) if self._manifest.prefix else None
        batches = Batches(job.seed, len(data), self._manifest.batch)
        hyper = {**self._manifest.hyper, **job.hyper}
        current = _Round(job, data, record, batches, hyper, data.facts())
        try:
            state, sums = self._train(current, carry)
        finally:
            if record is not None:
                record.close()
        finish = self._manifest.graph(self._manifest.finish)
        feeds = self._kept_feeds(current, finish, carry) | _given(current, finish, self._manifest.steps + 1)
        outputs = self._graphs.load(finish.name).run(_complete(finish, feeds), state).arrays
        if record is not None:
            record.delete()
        steps = max(1, self._manifest.steps)
        return RoundResult(
            update=labelled(outputs, "update"),
            masks={port.label: port.mask for port in finish.outputs_of("update") if port.mask},
            carry=labelled(outputs, "carry"),
            metrics={name: total / steps for name, total in sums.items()}
            | {name: float(value) for name, value in labelled(outputs, "metric").items()},
            samples=len(data),
        )

    def _train(self, current: _Round, carry: Arrays) -> tuple[State, dict[str, float]]:
        saved = self._memory.checkpoint(current.job.nonce)
        if saved is None:
            state, done, sums = self._start(current, carry), 0, {}
        else:
            state, done, sums = self._restored(saved), saved.step, dict(saved.sums)
        position = 0
        for phase in self._manifest.phases:
            if position + phase.steps > done:
                graph = self._graphs.load(phase.graph)
                for step in range(max(position, done), position + phase.steps):
                    state = self._step(current, phase.graph, graph, state, step, sums)
                    self._keep(current.job, state, step + 1, sums)
                del graph
                trim_memory()
            position += phase.steps
        return state, sums

    def _start(self, current: _Round, carry: Arrays) -> State:
        spec = self._manifest.graph(self._manifest.start)
        feeds = self._kept_feeds(current, spec, carry) | _given(current, spec, self._manifest.steps)
        return self._graphs.load(spec.name).run(_complete(spec, feeds), {}).state

    def _kept_feeds(self, current: _Round, spec: Graph, carry: Arrays) -> Arrays:
        """What a graph reads of the round's weights, and of what the previous round left (zeros if nothing did)."""
        feeds: Arrays = {}
        if spec.inputs_of("weights"):
            feeds = self._graphs.weight_feeds(spec, self._graphs.fetch(current.job, self._manifest.suffix))
        for port in spec.inputs_of("carry"):
            feeds[port.name] = carry.get(port.label, np.zeros(port.shape, port.dtype))
            check_port(port, feeds[port.name])
        return feeds

    def _step(
        self, current: _Round, name: str, graph: LoadedGraph, state: State, step: int, sums: dict[str, float]
    ) -> State:
        self._settings.check_aborted()
        feeds = self._feeds(current, self._manifest.graph(name), step)
        with self._profiler.timed("step"):
            outputs = graph.run(feeds, state)
        for metric, value in labelled(outputs.arrays, "metric").items():
            sums[metric] = sums.get(metric, 0.0) + float(value)
        mean_loss = sums.get("loss", float("nan")) / (step + 1)
        last_ms = self._profiler.last_ms("step")
        self._settings.watch(Step("train", step + 1, self._manifest.steps, mean_loss, last_ms))
        return {**state, **outputs.state}

    def _feeds(self, current: _Round, spec: Graph, step: int) -> Arrays:
        """Batches, hyper-parameters and noise of one step."""
        feeds = _given(current, spec, step)
        for port in spec.inputs_of("batch"):
            feeds[port.name] = _batch(current, port, step)
            check_port(port, feeds[port.name])
        return _complete(spec, feeds)

    def _keep(self, job: Job, state: State, step: int, sums: dict[str, float]) -> None:
        if step % self._settings.checkpoint_steps == 0 or step == self._manifest.steps:
            self._memory.save_checkpoint(job.nonce, Checkpoint(step, dict(sums), self._copies(state)))

    def _copies(self, state: State) -> Iterator[tuple[str, Array]]:
        """The tensors of the state, each copied only when it is asked for."""
        for name, value in state.items():
            yield from self._engine.read_state({name: value}).items()

    def _restored(self, saved: Checkpoint) -> State:
        state: State = {}
        for name, array in saved.tensors:
            state |= self._engine.write_state({name: array})
        return state


def _given(current: _Round, spec: Graph, draw: int) -> Arrays:
    """What any function may read: the scalars of the task, facts about the data, and noise of its own (number ``draw``
    of the round)."""
    feeds: Arrays = {}
    for port in spec.inputs_of("data"):
        if port.label not in current.facts:
            known = ", ".join(current.facts) or "none, as its labels are no class numbers"
            raise BundleError(
                f"graph {spec.name!r} asks for {port.name!r} of the local data, this device can tell: {known}; export "
                "the bundle for data like these, or install a newer edgefl",
                port=port.name,
            )
        feeds[port.name] = current.facts[port.label]
        check_port(port, feeds[port.name])
    for port in spec.inputs_of("hyper"):
        if port.label not in current.hyper:
            raise BundleError(f"the round sets no value for {port.name!r}; the server must announce it")
        feeds[port.name] = np.full(port.shape, current.hyper[port.label], port.dtype)
    for number, port in enumerate(spec.inputs_of("noise")):
        feeds[port.name] = local_data.noise(current.job.seed, draw, number, port.shape, port.dtype)
    return feeds


def _complete(spec: Graph, feeds: Arrays) -> Arrays:
    """``feeds`` if every input of ``spec`` but its state is there, else BundleError."""
    hungry = [port.name for port in spec.inputs if port.role != "state" and port.name not in feeds]
    if hungry:
        raise BundleError(
            f"graph {spec.name!r} reads {hungry}, which nobody feeds there (see the roles in docs/protocol.md); "
            "export the bundle again",
            ports=hungry,
        )
    return feeds


def _batch(current: _Round, port: Port, step: int) -> Array:
    """``batch.<stream>.x`` or ``.y``: features come from the record where there is a frozen prefix."""
    stream, _, part = port.label.partition(".")
    indices = current.batches.indices(int(stream), step)
    if part == "y":
        return current.data.labels(indices)
    if current.record is not None:
        return current.record.rows(indices, record_tag(current.job))
    return current.data.rows(indices)
