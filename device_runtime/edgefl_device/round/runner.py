"""One round on the device, for any manifest.

::

    prefix: per chunk fetch its units, run forward over the local data, write the record, drop the units
    weights of the suffix, carry -> start -> state
    per phase, per step (or batch of all rows): state, batch, data, noise, hyper -> state, metrics
    weights of the suffix, carry, state -> finish -> update, carry, metrics

The runner knows graphs, roles and ports, and no method by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from edgefl.wire.bundle.manifest import Graph, Manifest, PhaseSpec
from edgefl.wire.tensors import Array, Arrays
from edgefl_device.data.samples import FittedData
from edgefl_device.engine.base import Engine, LoadedGraph, State
from edgefl_device.memory import trim_memory
from edgefl_device.round.costs import Profiler
from edgefl_device.round.feeds import Feeds, complete, kept
from edgefl_device.round.forward import MultiStepForward, record_tag
from edgefl_device.round.graphs import Blobs, Graphs, GraphSettings, Memory, Step, labelled
from edgefl_device.round.job import Job
from edgefl_device.round.record import Record
from edgefl_device.store.checkpoint_rows import Checkpoint


@dataclass(frozen=True, repr=False)
class RoundResult:
    """What a round produced. ``update`` and ``carry`` are arrays by name, with the shapes and dtypes of the bundle's
    ports: what is sent, and what is kept until the next round. ``masks``: those of the update that are packed bits, with
    their number of entries. ``metrics``: means over the steps that report them, and those of ``finish`` as they are.
    ``samples``: local rows used."""

    update: Arrays
    masks: dict[str, int]
    carry: Arrays
    metrics: dict[str, float]
    samples: int

    def __repr__(self) -> str:
        metrics = ", ".join(f"{name}={value:.6g}" for name, value in self.metrics.items())
        return (
            f"RoundResult({metrics or 'no metrics'}, {self.samples} samples, {_counted(self.update)} in the update, "
            f"{_counted(self.carry)} kept)"
        )


def _counted(arrays: Mapping[str, Array]) -> str:
    return f"{len(arrays)} array{'s' * (len(arrays) != 1)}"


def means(manifest: Manifest, sums: Mapping[str, float], steps: Sequence[int]) -> dict[str, float]:
    """Return the mean of each metric over the steps that report it, where ``steps`` of each phase were made."""

    def reporting(metric: str) -> int:
        graphs = (manifest.graph(phase.graph) for phase in manifest.phases)
        return sum(
            made
            for graph, made in zip(graphs, steps, strict=True)
            if any(port.label == metric for port in graph.outputs_of("metric"))
        )

    return {name: total / max(1, reporting(name)) for name, total in sums.items()}


def result_of(
    manifest: Manifest, out: Arrays, sums: Mapping[str, float], steps: Sequence[int], samples: int
) -> RoundResult:
    """Return the result of a round from the outputs of its last graph and the ``sums`` of its steps' metrics."""
    update = manifest.graph(manifest.finish).outputs_of("update")
    last = {name: float(value) for name, value in labelled(out, "metric").items()}
    return RoundResult(
        update=labelled(out, "update"),
        masks={port.label: port.mask for port in update if port.mask},
        carry=labelled(out, "carry"),
        metrics=means(manifest, sums, steps) | last,
        samples=samples,
    )


@dataclass(frozen=True)
class _Round:
    """What every step of a round reads. ``steps`` are those of each phase, ``basis`` what the state is made of beside
    the task."""

    job: Job
    feeds: Feeds
    steps: tuple[int, ...]
    basis: str

    @property
    def total(self) -> int:
        return sum(self.steps)


@dataclass(eq=False, kw_only=True)
class RoundRunner:
    """Runs one :class:`Job`. Killed and run again with the same memory, it goes on where it was."""

    engine: Engine
    manifest: Manifest
    blobs: Blobs
    memory: Memory
    profiler: Profiler
    settings: GraphSettings

    def __post_init__(self) -> None:
        self._graphs = Graphs(self.engine, self.manifest, self.blobs, self.profiler, self.settings.tuning)
        self._forward = MultiStepForward(self._graphs, self.manifest, self.profiler, self.settings)

    @property
    def graphs(self) -> Graphs:
        """The graphs and weights in use; its ``residency`` tells what was ever in memory."""
        return self._graphs

    def run(self, job: Job, data: FittedData, carry: Arrays, origin: str = "") -> RoundResult:
        """The whole round. RoundAborted if it ended meanwhile; BundleError if graphs, blobs and ports disagree.

        ``origin`` names the carry: a checkpoint that began with another one, or with other rows, is not gone on from.
        """
        data = data.first(job.samples)
        record = self._forward.record(job, data) if self.manifest.prefix else None
        current = self._round(job, data, record, origin)
        try:
            state, sums = self._train(current, carry)
        finally:
            if record is not None:
                record.close()
        finish = self.manifest.graph(self.manifest.finish)
        feeds = self._kept_feeds(current, finish, carry) | current.feeds.given(finish, current.total + 1)
        outputs = self._graphs.run_once(finish.name, complete(finish, feeds, state), state).arrays
        if record is not None:
            record.delete()
        return result_of(self.manifest, outputs, sums, current.steps, len(data))

    def _round(self, job: Job, data: FittedData, record: Record | None, origin: str) -> _Round:
        features = None if record is None else partial(record.rows, version=record_tag(job))
        feeds = Feeds.of(self.manifest, job.seed, data, job.hyper, features)
        return _Round(job, feeds, self.manifest.steps_with(len(data)), f"{len(data)} rows, carry {origin}")

    def _train(self, current: _Round, carry: Arrays) -> tuple[State, dict[str, float]]:
        saved = self.memory.checkpoint(current.job.nonce)
        if saved is None or saved.basis != current.basis:
            state, done, sums = self._start(current, carry), 0, {}
        else:
            state, done, sums = self._restored(saved), saved.step, dict(saved.sums)
        position = 0
        for phase, steps in zip(self.manifest.phases, current.steps, strict=True):
            if position + steps > done:
                graphs: dict[str, LoadedGraph] = {}
                for step in range(max(position, done), position + steps):
                    state = self._step(current, phase, graphs, state, (position, step), sums)
                    self._keep(current, state, step + 1, sums)
                del graphs
                trim_memory()
            position += steps
        return state, sums

    def _start(self, current: _Round, carry: Arrays) -> State:
        spec = self.manifest.graph(self.manifest.start)
        feeds = self._kept_feeds(current, spec, carry) | current.feeds.given(spec, current.total)
        state = self._graphs.run_once(spec.name, complete(spec, feeds, ()), {}).state
        del feeds
        trim_memory()  # the weights: small tensors leave gaps that the next graph does not fit into
        return state

    def _kept_feeds(self, current: _Round, spec: Graph, carry: Arrays) -> Arrays:
        """What a graph reads of the round's weights, and of what the previous round left (zeros if nothing did)."""
        feeds: Arrays = {}
        if spec.inputs_of("weights"):
            feeds = self._graphs.weight_feeds(spec, self._graphs.fetch(current.job, self.manifest.suffix))
        return feeds | kept(spec, carry)

    def _step(
        self,
        current: _Round,
        phase: PhaseSpec,
        graphs: dict[str, LoadedGraph],
        state: State,
        at: tuple[int, int],
        sums: dict[str, float],
    ) -> State:
        """One step; ``at`` are the phase's first step and this one, both counted over all phases. ``graphs`` are those of
        the phase that were needed so far."""
        self.settings.check_aborted()
        first, step = at
        whole, feeds = self.manifest.graph(phase.graph), current.feeds
        spec = whole
        if phase.shorter:
            spec = self.manifest.graph(phase.graph_for(feeds.longest(whole, step)))
        batch = feeds.passed(spec, step - first) if phase.over_data else feeds.batches(whole, step, spec)
        fed = complete(spec, feeds.given(spec, step) | batch, state)
        if spec.name not in graphs:
            self._graphs.forms.try_on(spec, fed, state)
            graphs[spec.name] = self._graphs.load(spec.name)
        with self.profiler.timed("step"):
            outputs = graphs[spec.name].run(fed, state)
        self.settings.worked(self.profiler.last_ms("step"))
        for metric, value in labelled(outputs.arrays, "metric").items():
            sums[metric] = sums.get(metric, 0.0) + float(value)
        self._tell(current, step + 1, sums)
        return {**state, **outputs.state}

    def _tell(self, current: _Round, done: int, sums: Mapping[str, float]) -> None:
        loss = means(self.manifest, sums, _made(current.steps, done)).get("loss", float("nan"))
        self.settings.watch(Step("train", done, current.total, loss, self.profiler.last_ms("step")))

    def _keep(self, current: _Round, state: State, step: int, sums: dict[str, float]) -> None:
        if step % self.settings.checkpoint_steps == 0 or step == current.total:
            checkpoint = Checkpoint(step, dict(sums), self._copies(state), current.basis)
            self.memory.save_checkpoint(current.job.nonce, checkpoint)

    def _copies(self, state: State) -> Iterator[tuple[str, Array]]:
        """The tensors of the state, each copied only when it is asked for."""
        for name, value in state.items():
            yield from self.engine.read_state({name: value}).items()

    def _restored(self, saved: Checkpoint) -> State:
        state: State = {}
        for name, array in saved.tensors:
            state |= self.engine.write_state({name: array})
        return state


def _made(steps: Sequence[int], done: int) -> list[int]:
    """The steps made in each phase when ``done`` are, counted over all phases."""
    made = []
    for count in steps:
        made.append(min(count, done))
        done -= made[-1]
    return made
