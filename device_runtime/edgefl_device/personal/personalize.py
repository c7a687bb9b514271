"""The current model, adapted to this device's data by a few steps, and what that is worth on data it was not adapted to.

::

    prefix, if there is one: run forward over the samples to adapt to and over those that judge
    q times: weights, batch, data, noise, hyper -> personalize -> weights
    before, after, and in between: weights, masked batches -> evaluate -> sums

Nothing of it is sent, and nothing that training keeps is touched.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from edgefl.errors import BundleError, ConfigError
from edgefl.wire.bundle.manifest import Graph, Manifest
from edgefl.wire.metrics import added
from edgefl.wire.tensors import Array, Arrays
from edgefl_device.data import support
from edgefl_device.data.samples import FittedData, LabelSpec, Local
from edgefl_device.data.support import Shards
from edgefl_device.engine.base import Engine, LoadedGraph
from edgefl_device.memory import trim_memory
from edgefl_device.personal.point import Point, point_of
from edgefl_device.round.bounds import check_runtime
from edgefl_device.round.costs import Profiler
from edgefl_device.round.feeds import Feeds, complete
from edgefl_device.round.forward import MultiStepForward, record_tag
from edgefl_device.round.graphs import Blobs, Graphs, GraphSettings, labelled
from edgefl_device.round.job import Job
from edgefl_device.round.parts import parts_of

ALPHA = "alpha"
"""Label of the step size among the ``hyper`` ports."""

CURVE = (0, 1, 2, 5, 10)
"""Numbers of steps that a curve shows beside the wanted one."""


class Adapted(msgspec.Struct, frozen=True, kw_only=True):
    """What personalization gave on one device. ``support`` and ``query`` are numbers of samples.

    ``repeated``: there were fewer samples than a batch, which was then drawn with replacement. ``leaks``: samples that
    judge were adapted to, so that the numbers say nothing of new data. ``metric``: of those of each point, or the loss, the
    one to look at first. ``majority``: the accuracy of the most frequent class of the support, None for labels that are
    not one class each.
    """

    model: str
    algorithm: str
    tier: str
    round: int
    model_version: str
    protocol: support.Protocol
    leaks: bool
    note: str
    alpha: float
    batch: int
    seed: int
    support: int
    query: int
    repeated: bool
    metric: str
    majority: float | None
    before: Point
    after: Point
    curve: tuple[Point, ...]


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """How to personalize: ``steps`` of size ``alpha`` (None: the round's own), and after how many to judge (``curve``).

    ``protocol``, of ``train_support``, ``split_test`` and ``paper_literal``, says what is adapted to and what judges.
    ``seed`` decides splits and batches. ``test``: samples to judge by, beside the local data.
    ConfigError for values out of range.
    """

    protocol: support.Protocol = "train_support"
    steps: int = 1
    curve: tuple[int, ...] = ()
    alpha: float | None = None
    seed: int = 0
    test: Local | None = None

    def __post_init__(self) -> None:
        if not (self.alpha is None or 0 <= self.alpha < math.inf):
            raise ConfigError(f"alpha is a finite number of at least 0, found {self.alpha}", alpha=self.alpha)
        if min(self.seed, self.steps, *self.curve, 0) < 0:
            raise ConfigError(
                f"steps and seed are at least 0, found {self.steps} steps, seed {self.seed}", steps=self.steps
            )

    @property
    def stops(self) -> tuple[int, ...]:
        """After how many steps it judges, ascending: before the first, after the last, and along the curve."""
        return tuple(sorted({0, self.steps, *self.curve}))


def graphs_of(manifest: Manifest) -> tuple[Graph, ...]:
    """The graphs that a personalization runs."""
    names = (*(chunk.graph for chunk in manifest.prefix), manifest.evaluate, manifest.personalize)
    return tuple(manifest.graph(name) for name in names if name)


@dataclass(frozen=True)
class Chosen(FittedData):
    """The rows ``at`` of larger data, which stay where they are; ``y`` holds only theirs."""

    at: Array = field(kw_only=True)

    @classmethod
    def of(cls, data: FittedData, at: Array) -> Chosen:
        return cls(data.x, data.y[at], data.spec, data.others, data.label, at=at)

    def rows(self, indices: Array) -> Array:
        return super().rows(self.at[indices])

    def other(self, name: str, indices: Array) -> Array:
        return super().other(name, self.at[indices])


class Personalizer:
    """Adapts the model of a :class:`Job` on this device. ``folder`` takes the records of a frozen prefix, for a while."""

    def __init__(self, *, engine: Engine, manifest: Manifest, blobs: Blobs, folder: Path) -> None:
        if not manifest.personalize:
            raise BundleError(
                f"the bundle of tier {manifest.tier!r} has no graph that personalizes: algorithm "
                f"{manifest.program!r} has no "
                "such function, or the server that exported it is too old; `edgefl ls algorithms` tells which have one",
                algorithm=manifest.program,
            )
        check_runtime(manifest, engine)
        self._manifest = manifest
        self._folder = folder
        self._profiler = Profiler()
        self._graphs = Graphs(engine, manifest, blobs, self._profiler)
        self._parts = parts_of(engine, manifest, blobs)

    def run(self, job: Job, data: Local, wanted: Wanted) -> tuple[Adapted, Arrays]:
        """The report, and the adapted tensors of the trained units by their own names.

        DataError if the data do not fit the model or are too few for the protocol; BundleError if graphs, blobs and ports
        disagree.
        """
        judged, adapting = self._split(data, wanted)
        fetched = self._graphs.fetch(job, self._manifest.suffix)
        weights = {name: array for name, array in fetched.items() if name in self._read}
        alpha = self._alpha(job, wanted)
        with self._sources(job, judged, adapting, alpha, wanted.seed) as (query, support_feeds):
            points, weights = self._walk(wanted, weights, query, support_feeds)
        labels = np.concatenate([adapting.y, judged.y])
        ends = np.arange(len(labels))
        step = self._manifest.graph(self._manifest.personalize)
        points_by_steps = {point.steps: point for point in points}
        report = Adapted(
            model=self._manifest.model,
            algorithm=self._manifest.program,
            tier=self._manifest.tier,
            round=job.round,
            model_version=job.model_version,
            protocol=wanted.protocol,
            leaks=wanted.protocol == "paper_literal",
            note=support.NOTES[wanted.protocol],
            alpha=alpha,
            batch=_batch(step),
            seed=wanted.seed,
            support=len(adapting),
            query=len(judged),
            repeated=len(adapting) < _batch(step),
            metric=points_by_steps[0].metric,
            majority=support.majority(labels, ends[: len(adapting)], ends[len(adapting) :]),
            before=points_by_steps[0],
            after=points_by_steps[wanted.steps],
            curve=tuple(points),
        )
        return report, weights

    def frozen(self, job: Job) -> Arrays:
        """The tensors of the units that this tier only runs forward."""
        weights: Arrays = {}
        for chunk in self._manifest.prefix:
            weights |= self._graphs.fetch(job, chunk.units)
        return weights

    @property
    def _read(self) -> set[str]:
        """The tensors that are adapted or judged by; what the server keeps beside them is not."""
        graphs = (
            self._manifest.graph(name) for name in (self._manifest.personalize, self._manifest.evaluate)
        )
        return {port.label for graph in graphs for port in graph.inputs_of("weights")}

    def _split(self, data: Local, wanted: Wanted) -> tuple[Chosen, Chosen]:
        """(query, support). Without samples to judge by, a part of the local ones is held out, or all are the test shard."""
        label = LabelSpec.of(self._manifest)
        pools = [data.fitted(self._manifest.data, label, self._parts)]
        if wanted.test is not None:
            pools.append(wanted.test.fitted(self._manifest.data, label, self._parts))
        labels = np.concatenate([pool.y for pool in pools])
        own, every = len(pools[0]), np.arange(len(labels))
        if wanted.test is not None:
            shards = Shards(every[:own], every[own:])
        elif wanted.protocol == "train_support":
            shards = support.held_out(labels, seed=wanted.seed)
        else:
            shards = Shards(every[:0], every)
        parts = support.split(wanted.protocol, shards, labels, seed=wanted.seed)
        return _taken(pools, parts.query), _taken(pools, parts.support)

    def _alpha(self, job: Job, wanted: Wanted) -> float:
        known = {**self._manifest.hyper, **job.hyper}
        if wanted.alpha is None and ALPHA not in known:
            raise ConfigError("neither the bundle nor the round says how large a step is; give it by `alpha`")
        return known[ALPHA] if wanted.alpha is None else wanted.alpha

    @contextmanager
    def _sources(
        self, job: Job, judged: Chosen, adapting: Chosen, alpha: float, seed: int
    ) -> Iterator[tuple[Feeds, Feeds]]:
        """What feeds evaluation, and what feeds the steps; records of a prefix live as long as this."""
        hyper = {**self._manifest.hyper, **job.hyper, ALPHA: alpha}
        if not self._manifest.prefix:
            yield Feeds(seed, judged, hyper), Feeds(seed, adapting, hyper)
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=self._folder)))
            query = own = stack.enter_context(self._recorded(job, judged, folder / "query"))
            if not (judged.x is adapting.x and np.array_equal(judged.at, adapting.at)):
                own = stack.enter_context(self._recorded(job, adapting, folder / "support"))
            yield Feeds(seed, judged, hyper, features=query), Feeds(seed, adapting, hyper, features=own)

    @contextmanager
    def _recorded(self, job: Job, data: Chosen, folder: Path) -> Iterator[Callable[[Array], Array]]:
        settings = GraphSettings(folder=folder, checkpoint_steps=1)
        forward = MultiStepForward(self._graphs, self._manifest, self._profiler, settings)
        with forward.record(job, data) as record:
            yield lambda rows: record.rows(rows, record_tag(job))

    def _walk(self, wanted: Wanted, weights: Arrays, query: Feeds, own: Feeds) -> tuple[list[Point], Arrays]:
        """Return the points at all stops, and the weights after the wanted number of steps."""
        points: list[Point] = []
        adapted, done = weights, 0
        for stop in wanted.stops:
            if done < stop and own.hyper[ALPHA] > 0:
                weights = self._steps(weights, own, range(done, stop))
            done = stop
            points.append(self._judged(weights, query, stop))
            adapted = weights if stop == wanted.steps else adapted
            trim_memory()
        return points, adapted

    def _steps(self, weights: Arrays, own: Feeds, steps: range) -> Arrays:
        """Return the weights after ``steps``. The graph goes before another is loaded: memory is that of the larger."""
        graph = self._graphs.load(self._manifest.personalize)
        for step in steps:
            weights = {**weights, **self._stepped(graph, weights, own, step)}
        del graph
        trim_memory()
        return weights

    def _stepped(self, graph: LoadedGraph, weights: Arrays, own: Feeds, step: int) -> Arrays:
        spec = self._manifest.graph(self._manifest.personalize)
        rows = support.batch_rows(len(own.data), _batch(spec), step, seed=own.seed)
        feeds = self._graphs.weight_feeds(spec, weights) | own.given(spec, step)
        feeds |= {port.name: own.part(port, rows) for port in spec.inputs_of("batch")}
        for place, port in enumerate(spec.inputs_of("noise")):
            feeds[port.name] = support.uniform(port.shape, step, place, seed=own.seed).astype(port.dtype)
        return labelled(graph.run(complete(spec, feeds), {}).arrays, "weights")

    def _judged(self, weights: Arrays, query: Feeds, steps: int) -> Point:
        spec = self._manifest.graph(self._manifest.evaluate)
        graph = self._graphs.load(spec.name)
        fixed = self._graphs.weight_feeds(spec, weights) | query.given(spec, 0)
        sums: dict[str, Array] = {}
        for group in range(math.ceil(len(query.data) / _batch(spec))):
            feeds = complete(spec, fixed | query.passed(spec, group))
            sums = added(sums, labelled(graph.run(feeds, {}).arrays, "metric"))
        return point_of(steps, spec.metrics, sums)


def _taken(pools: Sequence[FittedData], rows: Array) -> Chosen:
    """The rows, all of one pool, of pools that are counted through."""
    start = 0
    for pool in pools:
        if rows[0] < start + len(pool):
            return Chosen.of(pool, rows - start)
        start += len(pool)
    raise IndexError(f"row {rows[0]} is in none of the pools")


def _batch(spec: Graph) -> int:
    """Rows of a graph's batch."""
    for port in spec.inputs_of("batch"):
        if port.label.endswith((".x", ".y")):
            return port.shape[0]
    raise BundleError(f"graph {spec.name!r} reads no batch; export the bundle again", graph=spec.name)
