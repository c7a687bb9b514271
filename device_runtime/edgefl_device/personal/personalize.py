"""Personalization: the current model, adapted to this device's data by a few steps and evaluated before and after.

::

    prefix (frozen units), if there is one: run forward over support and query samples
    q times: weights, batch, data, noise, hyper -> personalize -> weights
    before, after, and in between: weights, masked batches -> evaluate -> sums

Nothing is sent, and the stored state of training does not change.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from edgefl.errors import BundleError, ConfigError
from edgefl.wire.bundle.manifest import Graph, Manifest
from edgefl.wire.metrics import LOSS, METRICS, Sums, add_sums, compute_metrics
from edgefl.wire.tensors import Array, Arrays
from edgefl_device.data import support
from edgefl_device.data.samples import ChosenRows, FittedData, LabelSpec, LocalSource
from edgefl_device.data.support import SampleShards
from edgefl_device.engine.base import Engine, LoadedGraph
from edgefl_device.host import trim_memory
from edgefl_device.round.control import RoundControl
from edgefl_device.round.executor import LoadedBundleParts, check_runtime
from edgefl_device.round.forward import MultiStepForward, record_tag
from edgefl_device.round.graph_loader import BlobSource, GraphLoader, RoundProfiler, arrays_of_role
from edgefl_device.round.inputs import RoundInputs, check_complete
from edgefl_device.round.job import Job

_UNTOLD = ("accuracy",)
"""What bundles are measured by that do not say it."""


class AdaptationPoint(msgspec.Struct, frozen=True, kw_only=True):
    """Mean loss and metrics on the query samples after ``steps`` adaptation steps; the headline metric is the first one.

    ``metrics`` is empty for tasks that have only a loss.
    """

    steps: int
    loss: float
    metrics: dict[str, float]

    @property
    def metric(self) -> str:
        """Name of the headline metric; ``loss`` if there is no other."""
        return next(iter(self.metrics), LOSS)

    def value(self, metric: str) -> float:
        """Return the value of ``metric``, which may be ``loss``."""
        return self.loss if metric == LOSS else self.metrics[metric]


def point_of(steps: int, names: Sequence[str], sums: Sums) -> AdaptationPoint:
    """Return the point for metric sums over all query samples.

    Args:
        steps: Adaptation steps made.
        names: Metrics that the evaluation graph lists; unknown ones are ignored.
        sums: Sums of loss and metrics.
    """
    known = [name for name in names or _UNTOLD if name in METRICS]
    found = compute_metrics(known, sums)
    return AdaptationPoint(steps=steps, loss=found.pop(LOSS), metrics=found)


ALPHA = "alpha"
"""Label of the step size among the ``hyper`` ports."""

CURVE = (0, 1, 2, 5, 10)
"""Numbers of steps that a curve shows besides the wanted one."""


class PersonalizationReport(msgspec.Struct, frozen=True, kw_only=True):
    """Result of personalization on one device.

    Attributes:
        model: Name of the model.
        algorithm: Name of the algorithm.
        tier: The device's tier.
        round: Round of the model.
        model_version: Digest of the weights.
        protocol: Rule that chose support and query samples.
        leaks: True if support and query overlap, so that the metrics do not describe new data.
        note: Explanation of the protocol for people.
        alpha: Step size.
        batch: Rows of a batch.
        seed: Seed of splits and batches.
        support: Number of samples to adapt to.
        query: Number of samples to evaluate on.
        repeated: True if there are fewer samples than a batch, which is then drawn with replacement.
        metric: Name of the headline metric.
        majority: Accuracy of always predicting the most frequent class of the support; None if labels are not
            classes.
        before: Metrics before the first step.
        after: Metrics after the last step.
        curve: Metrics at all evaluated numbers of steps.
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
    before: AdaptationPoint
    after: AdaptationPoint
    curve: tuple[AdaptationPoint, ...]


@dataclass(frozen=True, kw_only=True)
class Adaptation:
    """Settings of a personalization.

    Attributes:
        protocol: ``train_support``, ``split_test`` or ``paper_literal``: chooses support and query samples.
        steps: Number of adaptation steps.
        curve: Further numbers of steps at which the model is evaluated.
        alpha: Step size; None: that of the round.
        seed: Seed of splits and batches.
        test: Samples to evaluate on besides the local data; None has none.

    Raises:
        ConfigError: A value is out of range.
    """

    protocol: support.Protocol = "train_support"
    steps: int = 1
    curve: tuple[int, ...] = ()
    alpha: float | None = None
    seed: int = 0
    test: LocalSource | None = None

    def __post_init__(self) -> None:
        if not (self.alpha is None or 0 <= self.alpha < math.inf):
            raise ConfigError(f"alpha is a finite number of at least 0, found {self.alpha}", alpha=self.alpha)
        if min(self.seed, self.steps, *self.curve, 0) < 0:
            raise ConfigError(
                f"steps and seed are at least 0, found {self.steps} steps, seed {self.seed}", steps=self.steps
            )

    @property
    def stops(self) -> tuple[int, ...]:
        """Numbers of steps after which the model is evaluated, ascending: 0, ``steps``, and those of ``curve``."""
        return tuple(sorted({0, self.steps, *self.curve}))


def graphs_of(manifest: Manifest) -> tuple[Graph, ...]:
    """Return the graphs that a personalization runs: those of the frozen units, ``evaluate``, and ``personalize`` if
    the bundle has it.
    """
    names = (*(chunk.graph for chunk in manifest.prefix), manifest.evaluate, manifest.personalize)
    return tuple(manifest.graph(name) for name in names if name)


class Personalizer:
    """Personalization of a :class:`Job`'s model on this device.

    ``folder`` holds the activations of frozen units while it runs.
    """

    def __init__(self, *, engine: Engine, manifest: Manifest, blobs: BlobSource, folder: Path) -> None:
        if not manifest.personalize:
            raise BundleError(
                f"the bundle of tier {manifest.tier!r} has no graph that personalizes: algorithm "
                f"{manifest.program!r} has no "
                "such function, or the server that exported it is too old; `edgefl ls algorithms` lists those that have one",
                algorithm=manifest.program,
            )
        check_runtime(manifest, engine)
        self._manifest = manifest
        self._folder = folder
        self._loader = GraphLoader(engine, manifest, blobs, RoundProfiler())
        self._parts = LoadedBundleParts(engine, manifest, blobs)

    def run(
        self, job: Job, data: LocalSource, adaptation: Adaptation
    ) -> tuple[PersonalizationReport, Arrays]:
        """Adapt and evaluate the model.

        Args:
            job: The round whose model is adapted.
            data: The local samples.
            adaptation: Settings.

        Returns:
            The report, and the adapted tensors of the trained units by global name.

        Raises:
            DataError: The data do not fit the model, or are too few for the protocol.
            BundleError: Graphs, blobs and ports disagree.
        """
        judged, adapting = self._split(data, adaptation)
        fetched = self._loader.fetch_weights(job, self._manifest.suffix)
        weights = {name: array for name, array in fetched.items() if name in self._read}
        alpha = self._alpha(job, adaptation)
        with self._sources(job, judged, adapting, alpha, adaptation.seed) as (query, support_feeds):
            points, weights = self._walk(adaptation, weights, query, support_feeds)
        labels = np.concatenate([adapting.y, judged.y])
        ends = np.arange(len(labels))
        step = self._manifest.graph(self._manifest.personalize)
        points_by_steps = {point.steps: point for point in points}
        report = PersonalizationReport(
            model=self._manifest.model,
            algorithm=self._manifest.program,
            tier=self._manifest.tier,
            round=job.round,
            model_version=job.model_version,
            protocol=adaptation.protocol,
            leaks=adaptation.protocol == "paper_literal",
            note=support.NOTES[adaptation.protocol],
            alpha=alpha,
            batch=_batch(step),
            seed=adaptation.seed,
            support=len(adapting),
            query=len(judged),
            repeated=len(adapting) < _batch(step),
            metric=points_by_steps[0].metric,
            majority=support.majority(labels, ends[: len(adapting)], ends[len(adapting) :]),
            before=points_by_steps[0],
            after=points_by_steps[adaptation.steps],
            curve=tuple(points),
        )
        return report, weights

    def frozen(self, job: Job) -> Arrays:
        """Return the tensors of the units that this tier runs forward and does not train, by global name."""
        weights: Arrays = {}
        for chunk in self._manifest.prefix:
            weights |= self._loader.fetch_weights(job, chunk.units)
        return weights

    @property
    def _read(self) -> set[str]:
        """Names of the weights that the graphs ``personalize`` and ``evaluate`` read."""
        graphs = (
            self._manifest.graph(name) for name in (self._manifest.personalize, self._manifest.evaluate)
        )
        return {port.label for graph in graphs for port in graph.inputs_of("weights")}

    def _split(self, data: LocalSource, adaptation: Adaptation) -> tuple[ChosenRows, ChosenRows]:
        """Return (query, support): the rows to evaluate on and the rows to adapt to.

        Without ``adaptation.test``, the protocol ``train_support`` holds out some local samples as test samples. The other
        protocols then use all local samples as test samples.
        """
        label = LabelSpec.of(self._manifest)
        pools = [data.fitted(self._manifest.data, label, self._parts)]
        if adaptation.test is not None:
            pools.append(adaptation.test.fitted(self._manifest.data, label, self._parts))
        labels = np.concatenate([pool.y for pool in pools])
        own, every = len(pools[0]), np.arange(len(labels))
        if adaptation.test is not None:
            shards = SampleShards(every[:own], every[own:])
        elif adaptation.protocol == "train_support":
            shards = support.held_out(labels, seed=adaptation.seed)
        else:
            shards = SampleShards(every[:0], every)
        parts = support.split(adaptation.protocol, shards, labels, seed=adaptation.seed)
        return _select_rows(pools, parts.query), _select_rows(pools, parts.support)

    def _alpha(self, job: Job, adaptation: Adaptation) -> float:
        known = {**self._manifest.hyper, **job.hyper}
        if adaptation.alpha is None and ALPHA not in known:
            raise ConfigError("neither the bundle nor the round says how large a step is; give it by `alpha`")
        return known[ALPHA] if adaptation.alpha is None else adaptation.alpha

    @contextmanager
    def _sources(
        self, job: Job, judged: ChosenRows, adapting: ChosenRows, alpha: float, seed: int
    ) -> Iterator[tuple[RoundInputs, RoundInputs]]:
        """Yield (query inputs, support inputs). The activations of a prefix are deleted when the context ends.

        Args:
            job: The round whose model is adapted.
            judged: Rows on which metrics are computed.
            adapting: Rows of the adaptation steps.
            alpha: Step size.
            seed: Seed of the batches.
        """
        hyper = {**self._manifest.hyper, **job.hyper, ALPHA: alpha}
        if not self._manifest.prefix:
            yield RoundInputs(seed, judged, hyper), RoundInputs(seed, adapting, hyper)
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=self._folder)))
            query = own = stack.enter_context(self._record(job, judged, folder / "query"))
            if not (judged.x is adapting.x and np.array_equal(judged.at, adapting.at)):
                own = stack.enter_context(self._record(job, adapting, folder / "support"))
            yield (
                RoundInputs(seed, judged, hyper, features=query),
                RoundInputs(seed, adapting, hyper, features=own),
            )

    @contextmanager
    def _record(self, job: Job, data: ChosenRows, folder: Path) -> Iterator[Callable[[Array], Array]]:
        forward = MultiStepForward(self._loader, None, folder)
        with forward.record(job, data, RoundControl()) as record:
            yield lambda rows: record.rows(rows, record_tag(job))

    def _walk(
        self, adaptation: Adaptation, weights: Arrays, query: RoundInputs, own: RoundInputs
    ) -> tuple[list[AdaptationPoint], Arrays]:
        """Return (metrics at all evaluated numbers of steps, weights after ``adaptation.steps`` steps).

        Args:
            adaptation: Settings.
            weights: Weights to begin with, by global name.
            query: Inputs for evaluation.
            own: Inputs for adaptation steps.
        """
        points: list[AdaptationPoint] = []
        adapted, done = weights, 0
        for stop in adaptation.stops:
            if done < stop and own.hyper[ALPHA] > 0:
                weights = self._steps(weights, own, range(done, stop))
            done = stop
            points.append(self._evaluate(weights, query, stop))
            adapted = weights if stop == adaptation.steps else adapted
            trim_memory()
        return points, adapted

    def _steps(self, weights: Arrays, own: RoundInputs, steps: range) -> Arrays:
        """Return the weights after the adaptation steps with the numbers ``steps``.

        Drops the graph before the caller loads another, so that memory holds only one.
        """
        graph = self._loader.load(self._manifest.personalize)
        for step in steps:
            weights = {**weights, **self._step(graph, weights, own, step)}
        del graph
        trim_memory()
        return weights

    def _step(self, graph: LoadedGraph, weights: Arrays, own: RoundInputs, step: int) -> Arrays:
        spec = self._manifest.graph(self._manifest.personalize)
        rows = support.batch_rows(len(own.data), _batch(spec), step, seed=own.seed)
        feeds = self._loader.weight_inputs(spec, weights) | own.shared(spec, step)
        feeds |= {port.name: own.rows(port, rows) for port in spec.inputs_of("batch")}
        for place, port in enumerate(spec.inputs_of("noise")):
            feeds[port.name] = support.uniform(port.shape, step, place, seed=own.seed).astype(port.dtype)
        return arrays_of_role(graph.run(check_complete(spec, feeds), {}).arrays, "weights")

    def _evaluate(self, weights: Arrays, query: RoundInputs, steps: int) -> AdaptationPoint:
        spec = self._manifest.graph(self._manifest.evaluate)
        graph = self._loader.load(spec.name)
        fixed = self._loader.weight_inputs(spec, weights) | query.shared(spec, 0)
        sums: dict[str, Array] = {}
        for group in range(math.ceil(len(query.data) / _batch(spec))):
            feeds = check_complete(spec, fixed | query.masked_batch(spec, group))
            sums = add_sums(sums, arrays_of_role(graph.run(feeds, {}).arrays, "metric"))
        return point_of(steps, spec.metrics, sums)


def _select_rows(pools: Sequence[FittedData], rows: Array) -> ChosenRows:
    """Return ``rows`` of consecutively numbered ``pools``; all of them lie in one pool. IndexError if none contains
    them.
    """
    start = 0
    for pool in pools:
        if rows[0] < start + len(pool):
            return ChosenRows.of(pool, rows - start)
        start += len(pool)
    raise IndexError(f"row {rows[0]} is in none of the pools")


def _batch(spec: Graph) -> int:
    """Return the batch size of a graph. BundleError if it reads no batch."""
    for port in spec.inputs_of("batch"):
        if port.label.endswith((".x", ".y")):
            return port.shape[0]
    raise BundleError(f"graph {spec.name!r} reads no batch; export the bundle again", graph=spec.name)
