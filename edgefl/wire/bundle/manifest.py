"""The manifest: what a tier downloads, graph by graph, and how the runtime is to call it.

The manifest names no method. Every graph lists its ports with their role, and the runtime feeds roles::

    weights, carry -> start -> state
    for chunk in prefix:  weights of the chunk's units, batch -> forward -> record
    for phase in phases:  phase.steps times: state, batch, data, noise, hyper -> state, metrics
    weights, carry, state -> finish -> update, carry

and, when a device adapts the model to its own data, ``weights, batch, hyper -> personalize -> weights``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec

from edgefl.wire.blobs import BlobRef
from edgefl.wire.bundle.formats import FormatName
from edgefl.wire.bundle.graphs import Fault, Graph, Port, Role, check_graph
from edgefl.wire.bundle.readers import Reader, Sound, Text, problem_of
from edgefl.wire.bundle.releases import numbers_of
from edgefl.wire.errors import BundleError
from edgefl.wire.mqtt.messages import MALFORMED, VERSION, Message

__all__ = [
    "PARTS",
    "PLANNED",
    "SAMPLE",
    "SEGMENTED",
    "Bucket",
    "Chunk",
    "DataSpec",
    "Draws",
    "Graph",
    "Input",
    "Manifest",
    "PhaseSpec",
    "Port",
    "Role",
    "decode_manifest",
    "encode_manifest",
]

SAMPLE = "sample"
"""The part of a batch that is the sample itself where x is what frozen units left of it."""

PARTS = ("x", "y", "mask", SAMPLE)
"""What every batch may have: what flows through the units, labels, which rows count, and the samples once more. Other parts
are inputs beside x."""

SEGMENTED = 3
"""The version of a manifest that has a graph in segments, so that a device that does not know them says so before it fetches
any. 2 is the version that nobody reads (the vector ``manifest_of_version_2``)."""

PLANNED = 4
"""The version of a manifest that has a graph with planned outputs, for the same reason."""

Draws = Literal["walk", "draw", "length"]
"""How a device chooses the rows of a batch (docs/protocol.md, Running a round)."""


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """Consecutive frozen units that are fetched, run forward and dropped together."""

    units: tuple[str, ...]
    graph: str


class Bucket(msgspec.Struct, frozen=True, kw_only=True):
    """``graph`` does the same for samples of which no more than the first ``length`` tokens count."""

    length: int
    graph: str


class PhaseSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``steps`` runs of ``graph``, in the order of the list.

    ``over_data``: one pass over all local samples in place of ``steps``, in their order, by ``batch.0`` alone;
    ``batch.0.mask`` is 0 at rows that only fill up the last batch. ``shorter``: graphs for batches of short samples, by
    ascending length.
    """

    name: str
    graph: str
    steps: int
    over_data: bool = False
    shorter: tuple[Bucket, ...] = ()

    def graph_for(self, length: int) -> str:
        """The graph for a batch whose longest sample has ``length`` tokens."""
        return next((bucket.graph for bucket in self.shorter if bucket.length >= length), self.graph)


class Input(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One sample of an input beside ``x``: a port ``batch.<k>.<name>``, and the array ``name`` of the local data.

    ``below``: its values are the whole numbers 0 .. below-1. 0 says nothing about them.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    below: int = 0


class DataSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one local sample looks like. Integer inputs become ``x * scale + shift`` in ``dtype``, if that is of floats.

    ``below``: of whole numbers, which are 0 .. below-1 (tokens of a vocabulary). 0 says nothing about them. ``others``: what
    a model reads of a sample beside ``x``. ``names``: of the classes, in the order of their numbers; empty where they have
    none. ``reader``: how files that hold no arrays become such samples.
    """

    shape: tuple[int, ...]
    dtype: str
    classes: int
    scale: float = 1.0
    shift: float = 0.0
    below: int = 0
    others: tuple[Input, ...] = ()
    names: tuple[str, ...] = ()
    reader: Reader | None = None

    @property
    def tokenizer(self) -> BlobRef | None:
        """The blob that texts become tokens by, if there is one."""
        return self.reader.tokenizer if isinstance(self.reader, Text) else None


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """A bundle's table of contents. Its own SHA-256 names the bundle.

    ``codec`` and ``codec_version`` name what the bytes of an update mean: a device repeats them beside the update.
    ``exchange`` tells people which one of a method of several this is, "" the main one. ``personalize`` is the graph that
    adapts the weights to a device's data by one step, if there is one: ``weights.*`` and a batch to ``weights.*``.
    ``draws``: batches come from one shuffled walk through the data, each is drawn anew, or they are of like lengths. A
    carry is good for the next ``carry_exchanges`` rounds that are completed after its own (0: as long as the run goes);
    without one that is ``carry_needed`` the device declines. ``sources`` tells where each node of the graphs comes from
    (:mod:`edgefl.wire.bundle.sources`); it is read for a profile and never fetched in a round.
    """

    v: int = VERSION
    model: str
    program: str
    tier: str
    parameters: int
    data: DataSpec
    batch: int
    prefix: tuple[Chunk, ...]
    suffix: tuple[str, ...]
    start: str
    phases: tuple[PhaseSpec, ...]
    finish: str
    evaluate: str
    hyper: dict[str, float]
    graphs: tuple[Graph, ...]
    codec: str
    codec_version: int
    draws: Draws
    personalize: str = ""
    exchange: str = ""
    carry_exchanges: int = 0
    carry_needed: bool = False
    sources: BlobRef | None = None

    def graph(self, name: str) -> Graph:
        for graph in self.graphs:
            if graph.name == name:
                return graph
        raise BundleError(f"the manifest names graph {name!r} but does not list it; export the bundle again")

    @property
    def blobs(self) -> tuple[BlobRef, ...]:
        """All that a bundle's file holds: the graphs, their variants, their sources if they were kept, and what texts are
        read by."""
        graphs = tuple(graph.blob for graph in self.graphs)
        variants = tuple(variant.blob for graph in self.graphs for variant in graph.variants)
        return (*graphs, *variants, *(ref for ref in (self.sources, self.data.tokenizer) if ref))

    @property
    def format(self) -> FormatName:
        """What its graphs are written in: one format, as a device runs them all."""
        return self.graphs[0].format

    @property
    def steps(self) -> int:
        """Local steps of a round over all phases but those over the data, whose number is the device's."""
        return sum(phase.steps for phase in self.phases if not phase.over_data)

    def steps_with(self, samples: int) -> tuple[int, ...]:
        """Local steps of each phase on a device that has so many samples."""
        return tuple(
            -(-samples // self.pass_rows(phase)) if phase.over_data else phase.steps for phase in self.phases
        )

    @property
    def of_round(self) -> tuple[Graph, ...]:
        """The graphs that a round runs; the others are for a device's own use of the model."""
        names = [*(chunk.graph for chunk in self.prefix), self.start]
        names += [*(name for phase in self.phases for name in _graphs_of(phase)), self.finish]
        return tuple(self.graph(name) for name in dict.fromkeys(names))

    @property
    def planned_bytes(self) -> int:
        """Anonymous memory that a round is planned to take above the idle agent, in bytes; 0 if it is not known."""
        return max((graph.planned_bytes for graph in self.of_round), default=0)

    @property
    def least_runtime(self) -> str:
        """First release of the format's runtime that loads all graphs; empty if it is not known."""
        return max(
            (graph.least_runtime for graph in self.graphs if graph.least_runtime), key=numbers_of, default=""
        )

    def pass_rows(self, phase: PhaseSpec) -> int:
        """Rows of each step of a phase over the data; BundleError if its graph reads none."""
        for port in self.graph(phase.graph).inputs_of("batch"):
            if port.label == "0.x" and port.shape and port.shape[0] > 0:
                return port.shape[0]
        raise BundleError(
            f"phase {phase.name!r} passes over the data, and graph {phase.graph!r} reads no rows of them as "
            "'batch.0.x'; export the bundle again",
            phase=phase.name,
        )


_decoder = msgspec.msgpack.Decoder(Manifest)
"""Made when the module is imported: two threads that decode a type for the first time can crash msgspec."""


def encode_manifest(manifest: Manifest) -> bytes:
    """Deterministic bytes: equal manifests have equal digests."""
    return msgspec.msgpack.encode(manifest, order="deterministic")


def decode_manifest(data: bytes) -> Manifest:
    """The manifest in ``data``; BundleError if it is malformed, of another version, or inconsistent."""
    try:
        version = msgspec.msgpack.decode(data, type=Message).v
        if version not in (VERSION, SEGMENTED, PLANNED):
            raise BundleError(
                f"the manifest has version {version}, this runtime reads {VERSION}, {SEGMENTED} and {PLANNED}: install a "
                "matching edgefl",
                version=version,
            )
        manifest = _decoder.decode(data)
    except MALFORMED as error:
        raise BundleError(f"the manifest is malformed: {error}; export the bundle again") from error
    _check(manifest)
    return manifest


def _graphs_of(phase: PhaseSpec) -> list[str]:
    return [phase.graph, *(bucket.graph for bucket in phase.shorter)]


def _check(manifest: Manifest) -> None:
    used = [manifest.start, manifest.finish, manifest.evaluate]
    used += [chunk.graph for chunk in manifest.prefix]
    used += [name for phase in manifest.phases for name in _graphs_of(phase)]
    used += [manifest.personalize] if manifest.personalize else []
    reader = manifest.data.reader
    used += [reader.features] if isinstance(reader, Sound) and reader.features else []
    for name in used:
        manifest.graph(name)
    for problem, details in _faults(manifest):
        raise BundleError(f"{problem}; export the bundle again", **details)


def _faults(manifest: Manifest) -> Iterator[Fault]:
    for phase in manifest.phases:
        lengths = [bucket.length for bucket in phase.shorter]
        if lengths != sorted({*lengths}) or any(length < 1 for length in lengths):
            text = f"has graphs for the lengths {lengths}, which should ascend from 1 on"
            yield f"phase {phase.name!r} {text}", {"lengths": lengths}
        if phase.over_data:
            manifest.pass_rows(phase)
    for graph in manifest.graphs:
        check_graph(graph)
        for there, what, version in (
            (bool(graph.segments), "segments", SEGMENTED),
            (graph.planned_outputs, "planned outputs", PLANNED),
        ):
            if there and manifest.v != version:
                text = f"has {what} in a manifest of version {manifest.v}, which is {version} then"
                yield f"graph {graph.name!r} {text}", {"graph": graph.name}
    if manifest.batch <= 0 or any(phase.steps < 0 for phase in manifest.phases):
        yield "batch and steps of a manifest must be positive", {}
    if manifest.carry_exchanges < 0:
        text = f"a carry cannot be good for {manifest.carry_exchanges} rounds"
        yield text, {"carry_exchanges": manifest.carry_exchanges}
    yield from _data_faults(manifest)


def _data_faults(manifest: Manifest) -> Iterator[Fault]:
    data, reader = manifest.data, manifest.data.reader
    names = [each.name for each in data.others]
    if len({*names, *PARTS}) < len(names) + len(PARTS):
        text = f"each has a name of its own, and none is called {', '.join(PARTS)}"
        yield f"the inputs beside x are called {', '.join(names)}: {text}", {"names": names}
    if data.names and not len({*data.names}) == len(data.names) == data.classes:
        text = f"the data have {data.classes} classes and {len({*data.names})} different names for them"
        yield text, {"names": data.names}
    if reader is not None and (problem := problem_of(reader)):
        yield f"the reader of a manifest cannot be used: {problem}", {}
    shown = (manifest.model, manifest.program, manifest.tier, manifest.exchange, *names, *data.names)
    for name in (*shown, *(graph.name for graph in manifest.graphs)):
        if not name.isprintable():
            yield f"the name {name!r} in a manifest cannot be shown", {"name": name}
