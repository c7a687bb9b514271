"""What feeds the ports of a graph, by role: batches, facts about the data, scalars and noise.

::

    feeds = Feeds(seed=7, data=data, hyper={"lr": 0.1})
    complete(spec, feeds.given(spec, step) | feeds.batches(spec, step))     # a step
    complete(spec, feeds.given(spec, step) | feeds.passed(spec, step))      # step of a pass over the data, masked

Weights come from :meth:`edgefl_device.round.graphs.Graphs.weight_feeds`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from edgefl.errors import BundleError
from edgefl.wire.bundle.manifest import SAMPLE, Draws, Graph, Manifest, Port
from edgefl.wire.tensors import Array, Arrays
from edgefl_device.data import samples as local_data
from edgefl_device.data.samples import Batches, FittedData, Pass
from edgefl_device.round.graphs import check_port

Features = Callable[[Array], Array]
"""Row numbers (n,) -> what the first trained unit reads of these rows, (n, *shape)."""


@dataclass(frozen=True, eq=False)
class Feeds:
    """Everything a graph reads but weights, state and carry: a pure function of ``seed`` and the number of the step.

    ``features`` takes the place of the samples where units before the trained ones have seen them already. ``edges``: the
    lengths that there are graphs for beside the whole one, ascending.
    """

    seed: int
    data: FittedData
    hyper: Mapping[str, float] = field(default_factory=dict)
    draws: Draws = "walk"
    features: Features | None = None
    edges: tuple[int, ...] = ()
    _batches: dict[int, Batches] = field(default_factory=dict, repr=False)

    @classmethod
    def of(
        cls,
        manifest: Manifest,
        seed: int,
        data: FittedData,
        hyper: Mapping[str, float],
        features: Features | None,
    ) -> Feeds:
        """Return the feeds of a round of ``manifest``, for which the server announced the scalars ``hyper``."""
        edges = {bucket.length for phase in manifest.phases for bucket in phase.shorter}
        return cls(seed, data, {**manifest.hyper, **hyper}, manifest.draws, features, tuple(sorted(edges)))

    def given(self, spec: Graph, number: int) -> Arrays:
        """What any function may read: the scalars of the task, facts about the data, and noise of its own
        (draw ``number``)."""
        feeds = {port.name: self._fact(spec, port) for port in spec.inputs_of("data")}
        for port in spec.inputs_of("hyper"):
            if port.label not in self.hyper:
                raise BundleError(f"the round sets no value for {port.name!r}; the server must announce it")
            feeds[port.name] = np.full(port.shape, self.hyper[port.label], port.dtype)
        for place, port in enumerate(spec.inputs_of("noise")):
            feeds[port.name] = local_data.noise(self.seed, number, place, port.shape, port.dtype)
        return feeds

    def batches(self, spec: Graph, step: int, shorter: Graph | None = None) -> Arrays:
        """Batches of step ``step``, each stream's of the size that its ports have; without the padding at their end that
        ``shorter``, which takes the place of ``spec`` in this step, does not read."""
        ports = {} if shorter is None else {port.name: port for port in shorter.inputs_of("batch")}
        feeds: Arrays = {}
        for port in spec.inputs_of("batch"):
            stream, _, part = port.label.partition(".")
            if part != "mask":
                whole = self.part(port, self._drawn(int(stream), _rows(port), step))
                feeds[port.name] = _cut(whole, ports[port.name]) if port.name in ports else whole
        return feeds

    def longest(self, spec: Graph, step: int) -> int:
        """Tokens of the longest sample in the batches that ``spec`` reads in step ``step``."""
        streams = {port.label.partition(".")[0]: _rows(port) for port in spec.inputs_of("batch")}
        return max(
            int(self.data.lengths[self._drawn(int(stream), rows, step)].max())
            for stream, rows in streams.items()
        )

    def _drawn(self, stream: int, rows: int, step: int) -> Array:
        if rows not in self._batches:
            self._batches[rows] = Batches(self.seed, len(self.data), rows, self.draws, self._buckets)
        return self._batches[rows].indices(stream, step)

    @cached_property
    def _buckets(self) -> Array | None:
        return np.searchsorted(self.edges, self.data.lengths) if self.edges else None

    def passed(self, spec: Graph, step: int) -> Arrays:
        """The batch of step ``step`` of a pass over the data, with its mask."""
        feeds: Arrays = {}
        for port in spec.inputs_of("batch"):
            part, over = port.label.partition(".")[2], Pass(len(self.data), _rows(port))
            if part == "mask":
                feeds[port.name] = over.mask(step)
                check_port(port, feeds[port.name])
            else:
                feeds[port.name] = self.part(port, over.indices(step))
        return feeds

    def part(self, port: Port, rows: Array) -> Array:
        """``rows`` as a port of the batch has them; BundleError for one that the data have not, or of another shape."""
        part = port.label.partition(".")[2]
        if part == "y":
            found = self.data.labels(rows)
        elif part == "x":
            found = self.data.rows(rows) if self.features is None else self.features(rows)
        else:
            found = other_rows(self.data, port, rows)
        check_port(port, found)
        return found

    @cached_property
    def _facts(self) -> dict[str, Array]:
        return self.data.facts()

    def _fact(self, spec: Graph, port: Port) -> Array:
        if port.label not in self._facts:
            known = ", ".join(self._facts) or "none, as its labels are no class numbers"
            raise BundleError(
                f"graph {spec.name!r} asks for {port.name!r} of the local data, this device can tell: {known}; export "
                "the bundle for data like these, or install a newer edgefl",
                port=port.name,
            )
        check_port(port, self._facts[port.label])
        return self._facts[port.label]


def complete(spec: Graph, feeds: Arrays, state: Collection[str] | None = None) -> Arrays:
    """``feeds`` if every input of ``spec`` is there, else BundleError; its state is looked for where the names of what the
    calls before it left are given."""
    hungry = [
        port.name
        for port in spec.inputs
        if (port.name not in feeds if port.role != "state" else state is not None and port.name not in state)
    ]
    if hungry:
        raise BundleError(
            f"graph {spec.name!r} reads {hungry}, which nobody feeds there (see the roles in docs/protocol.md); "
            "export the bundle again",
            ports=hungry,
        )
    return feeds


def kept(spec: Graph, carry: Arrays) -> Arrays:
    """Return what a graph reads of earlier rounds: zeros where nothing is left."""
    feeds: Arrays = {}
    for port in spec.inputs_of("carry"):
        feeds[port.name] = carry.get(port.label, np.zeros(port.shape, port.dtype))
        check_port(port, feeds[port.name])
    return feeds


def _cut(rows: Array, port: Port) -> Array:
    """The beginning of each of ``rows``, as long as the port is; BundleError for a port that is longer than they are."""
    found = np.ascontiguousarray(rows[tuple(slice(size) for size in port.shape)])
    check_port(port, found)
    return found


def other_rows(data: FittedData, port: Port, rows: Array) -> Array:
    """``rows`` of an input beside x, or of the samples themselves; BundleError if the manifest does not describe it."""
    name = port.label.partition(".")[2]
    if name == SAMPLE and name not in data.others:
        return data.rows(rows)
    if name not in data.others:
        raise BundleError(
            f"a graph reads {port.name!r}, and the manifest describes no input {name!r} of the local data; export the "
            "bundle again",
            port=port.name,
        )
    return data.other(name, rows)


def _rows(port: Port) -> int:
    """Rows of a batch port; one for a scalar, which no batch fits."""
    return port.shape[0] if port.shape else 1
