"""Inputs of graphs, by the role of each port: batches, facts about the data, scalars and noise.

::

    inputs = RoundInputs(seed=7, data=data, hyper={"lr": 0.1})
    check_complete(spec, inputs.shared(spec, step) | inputs.batch(spec, step))         # a training step
    check_complete(spec, inputs.shared(spec, step) | inputs.masked_batch(spec, step))  # a step of a pass over the data

Weights come from :meth:`edgefl_device.round.graph_loader.GraphLoader.weight_inputs`.
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
from edgefl_device.data.samples import Batches, DataPass, FittedData
from edgefl_device.round.graph_loader import check_port

Features = Callable[[Array], Array]
"""Row numbers (n,) -> inputs of the first trained unit for these rows, (n, *shape)."""


@dataclass(frozen=True, eq=False)
class RoundInputs:
    """Inputs of graphs except weights, state and carry (state of an earlier round): a function of seed and step number
    only.

    Attributes:
        seed: Seed of the task.
        data: The local rows of the round.
        hyper: Scalars of the round by label.
        draws: ``walk`` goes through shuffled data, ``draw`` draws each batch independently, ``length`` groups samples
            of similar length.
        features: Function from row numbers to the activations of a frozen prefix; None feeds the samples.
        edges: Sample lengths in tokens for which the step has a shorter graph, ascending.
    """

    seed: int
    data: FittedData
    hyper: Mapping[str, float] = field(default_factory=dict)
    draws: Draws = "walk"
    features: Features | None = None
    edges: tuple[int, ...] = ()
    _batches: dict[int, Batches] = field(default_factory=dict, repr=False)

    @classmethod
    def for_round(
        cls,
        manifest: Manifest,
        seed: int,
        data: FittedData,
        hyper: Mapping[str, float],
        features: Features | None,
    ) -> RoundInputs:
        """Return the inputs of a round.

        Args:
            manifest: The bundle's manifest.
            seed: Seed of the task.
            data: The local rows of the round.
            hyper: Announced scalars, which replace those of the manifest.
            features: Function from row numbers to the activations of a frozen prefix; None if there is none.
        """
        edges = {bucket.length for phase in manifest.phases for bucket in phase.shorter}
        return cls(seed, data, {**manifest.hyper, **hyper}, manifest.draws, features, tuple(sorted(edges)))

    def shared(self, spec: Graph, number: int) -> Arrays:
        """Return the inputs of ``spec`` that are not batches, by port name: scalars, facts about the data, and noise.

        Args:
            spec: The graph.
            number: Number of the step, which selects the noise.

        Raises:
            BundleError: A scalar has no value.
        """
        feeds = {port.name: self._fact(spec, port) for port in spec.inputs_of("data")}
        for port in spec.inputs_of("hyper"):
            if port.label not in self.hyper:
                raise BundleError(f"the round sets no value for {port.name!r}; the server must announce it")
            feeds[port.name] = np.full(port.shape, self.hyper[port.label], port.dtype)
        for place, port in enumerate(spec.inputs_of("noise")):
            feeds[port.name] = local_data.noise(self.seed, number, place, port.shape, port.dtype)
        return feeds

    def batch(self, spec: Graph, step: int, shorter: Graph | None = None) -> Arrays:
        """Return the batch inputs of ``spec`` for step ``step``, without masks.

        Args:
            spec: The graph, whose ports define the size of each stream's batch.
            step: Number of the step.
            shorter: Graph for shorter samples that runs instead; batches are cut to its length, which removes
                padding only.
        """
        ports = {} if shorter is None else {port.name: port for port in shorter.inputs_of("batch")}
        feeds: Arrays = {}
        for port in spec.inputs_of("batch"):
            stream, _, part = port.label.partition(".")
            if part == "mask":
                continue
            rows = self.rows(port, self._drawn(int(stream), _batch_size(port), step))
            if (short := ports.get(port.name)) is not None:
                rows = np.ascontiguousarray(rows[tuple(slice(size) for size in short.shape)])
                check_port(short, rows)
            feeds[port.name] = rows
        return feeds

    def longest_sample(self, spec: Graph, step: int) -> int:
        """Return the number of tokens of the longest sample in the batches of step ``step``."""
        streams = {port.label.partition(".")[0]: _batch_size(port) for port in spec.inputs_of("batch")}
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

    def masked_batch(self, spec: Graph, step: int) -> Arrays:
        """Return the batch inputs of ``spec`` for batch ``step`` of one pass over the data, by port name. A mask is 0
        for rows that only fill the last batch.
        """
        feeds: Arrays = {}
        for port in spec.inputs_of("batch"):
            part, over = port.label.partition(".")[2], DataPass(len(self.data), _batch_size(port))
            if part == "mask":
                feeds[port.name] = over.mask(step)
                check_port(port, feeds[port.name])
            else:
                feeds[port.name] = self.rows(port, over.indices(step))
        return feeds

    def rows(self, port: Port, indices: Array) -> Array:
        """Return the rows ``indices`` of the local data for a batch ``port``, shape (len(indices), *row).

        The last part of the port's label selects them: ``y`` for labels, ``x`` for the samples (or for the activations
        of a frozen prefix), or the name of a further input.

        Raises:
            BundleError: The manifest lacks that input.
            DataError: The rows have another shape or dtype than the port.
        """
        part = port.label.partition(".")[2]
        if part == "y":
            rows = self.data.labels(indices)
        elif part == "x":
            rows = self.data.rows(indices) if self.features is None else self.features(indices)
        else:
            rows = other_rows(self.data, port, indices)
        check_port(port, rows)
        return rows

    @cached_property
    def _facts(self) -> dict[str, Array]:
        return self.data.facts()

    def _fact(self, spec: Graph, port: Port) -> Array:
        if port.label not in self._facts:
            known = ", ".join(self._facts) or "none, as its labels are no class numbers"
            raise BundleError(
                f"graph {spec.name!r} asks for {port.name!r} of the local data, this device knows: {known}; export "
                "the bundle for data like these, or install a newer edgefl",
                port=port.name,
                known=known,
            )
        check_port(port, self._facts[port.label])
        return self._facts[port.label]


def check_complete(spec: Graph, feeds: Arrays, state: Collection[str] | None = None) -> Arrays:
    """Check that ``feeds`` and ``state`` have every input of a graph, and return ``feeds`` unchanged.

    Args:
        spec: The graph.
        feeds: Its inputs by port name.
        state: Names of the state that will be given; None does not check state inputs.

    Raises:
        BundleError: An input is missing.
    """
    missing = [
        port.name
        for port in spec.inputs
        if (port.name not in feeds if port.role != "state" else state is not None and port.name not in state)
    ]
    if missing:
        raise BundleError(
            f"graph {spec.name!r} reads {missing}, which have no source (see the roles in docs/protocol.md); "
            "export the bundle again",
            ports=missing,
        )
    return feeds


def carry_inputs(spec: Graph, carry: Arrays) -> Arrays:
    """Return the inputs of ``spec`` with role ``carry`` (state of an earlier round), by port name; zeros where
    ``carry`` has no array.
    """
    feeds: Arrays = {}
    for port in spec.inputs_of("carry"):
        feeds[port.name] = carry.get(port.label, np.zeros(port.shape, port.dtype))
        check_port(port, feeds[port.name])
    return feeds


def other_rows(data: FittedData, port: Port, indices: Array) -> Array:
    """Return the rows at ``indices`` of the further input that ``port`` reads; for the label ``<stream>.sample`` those
    of the samples.

    Raises:
        BundleError: The manifest lacks that input.
    """
    name = port.label.partition(".")[2]
    if name == SAMPLE and name not in data.others:
        return data.rows(indices)
    if name not in data.others:
        raise BundleError(
            f"a graph reads {port.name!r}, and the manifest describes no input {name!r} of the local data; export the "
            "bundle again",
            port=port.name,
        )
    return data.other(name, indices)


def _batch_size(port: Port) -> int:
    """Return the first dimension of a batch port; 1 for a scalar port."""
    return port.shape[0] if port.shape else 1
