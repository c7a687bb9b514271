"""The manifest: the graphs that a tier downloads, and how the runtime calls them.

The manifest names no method. Every graph lists its ports with their role, and the runtime feeds roles::

    weights, carry -> start -> state;
    for chunk in prefix:  weights of the chunk's units, batch -> forward -> record;
    for phase in phases:  phase.steps times: state, batch, data, noise, hyper -> state, metrics;
    weights, carry, state -> finish -> update, carry.

A device that adapts the model to its own data also runs ``weights, batch, hyper -> personalize -> weights``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec

from edgefl.errors import BundleError
from edgefl.wire.blobs import BlobRef
from edgefl.wire.bundle.formats import FormatName, numbers_of
from edgefl.wire.bundle.graphs import Fault, Graph, Port, Role, check_graph
from edgefl.wire.bundle.readers import Reader, SoundReader, TextReader, problem_of
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
"""Part of a batch with the original sample if x is the output of frozen units."""

PARTS = ("x", "y", "mask", SAMPLE)
"""Parts that every batch may have: the input of the units, labels, the mask of rows that count, and the original samples.

Other parts are additional inputs.
"""

SEGMENTED = 3
"""Version of a manifest with a graph in segments, so that an old device refuses it before it fetches any. No reader accepts
version 2 (the vector ``manifest_of_version_2``).
"""

PLANNED = 4
"""Version of a manifest with a graph with planned outputs, for the same reason."""

Draws = Literal["walk", "draw", "length"]
"""Method by which a device chooses the rows of a batch (docs/protocol.md, Running a round)."""


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """Consecutive frozen units that are fetched, run forward and dropped together."""

    units: tuple[str, ...]
    graph: str


class Bucket(msgspec.Struct, frozen=True, kw_only=True):
    """A graph for batches whose samples have at most ``length`` tokens."""

    length: int
    graph: str


class PhaseSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``steps`` runs of ``graph``. Phases run in the order of the list.

    Attributes:
        over_data: One pass over all local samples in their order instead of ``steps``, by ``batch.0`` alone.
            ``batch.0.mask`` is 0 at rows that only fill up the last batch.
        shorter: Graphs for batches of short samples, by ascending length.
    """

    name: str
    graph: str
    steps: int
    over_data: bool = False
    shorter: tuple[Bucket, ...] = ()

    def graph_for(self, length: int) -> str:
        """Return the graph for a batch whose longest sample has ``length`` tokens."""
        return next((bucket.graph for bucket in self.shorter if bucket.length >= length), self.graph)


class Input(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One sample of an input besides ``x``: the port ``batch.<k>.<name>`` and the array ``name`` of the local data.

    ``below``: its values are the whole numbers 0 .. below-1. 0: unbounded.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    below: int = 0


class DataSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Shape and encoding of one local sample. Integer inputs become ``x * scale + shift`` in ``dtype``, if that is floating.

    Attributes:
        below: Whole numbers are 0 .. below-1 (tokens of a vocabulary). 0: unbounded.
        others: Inputs of the model besides ``x``.
        names: Class names in the order of their numbers. Empty if they have none.
        reader: Conversion of files that hold no arrays.
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
        """Blob of the tokenizer, if there is one."""
        return self.reader.tokenizer if isinstance(self.reader, TextReader) else None


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Table of contents of a bundle. Its own SHA-256 names the bundle.

    Attributes:
        codec: Encoding of an update's bytes, with ``codec_version``. A device repeats both beside the update.
        exchange: Name of this exchange if a method has several, for people. "": the main one.
        personalize: Graph that adapts the weights to a device's data by one step: ``weights.*`` and a batch to
            ``weights.*``.
        draws: Batches follow one shuffled pass through the data, are drawn independently, or have like lengths.
        carry_exchanges: Completed rounds after its own for which a carry is valid. 0: as long as the run lasts.
        carry_needed: The device declines if it has no carry.
        sources: Origin of each node of the graphs (:mod:`edgefl.wire.bundle.sources`), fetched for profiles only.
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
        """Contents of a bundle's file: graphs, variants, sources if they were kept, and the tokenizer."""
        graphs = tuple(graph.blob for graph in self.graphs)
        variants = tuple(variant.blob for graph in self.graphs for variant in graph.variants)
        return (*graphs, *variants, *(ref for ref in (self.sources, self.data.tokenizer) if ref))

    @property
    def format(self) -> FormatName:
        """Format of all graphs."""
        return self.graphs[0].format

    @property
    def steps(self) -> int:
        """Local steps of a round, without phases over the data, whose number depends on the device."""
        return sum(phase.steps for phase in self.phases if not phase.over_data)

    def steps_with(self, samples: int) -> tuple[int, ...]:
        """Return the local steps of each phase on a device with ``samples`` samples."""
        return tuple(
            -(-samples // self.pass_rows(phase)) if phase.over_data else phase.steps for phase in self.phases
        )

    @property
    def of_round(self) -> tuple[Graph, ...]:
        """Graphs that a round runs. The others are for a device's own use of the model."""
        names = [*(chunk.graph for chunk in self.prefix), self.start]
        names += [*(name for phase in self.phases for name in _graphs_of(phase)), self.finish]
        return tuple(self.graph(name) for name in dict.fromkeys(names))

    @property
    def planned_bytes(self) -> int:
        """Planned anonymous memory of a round above the idle agent, in bytes. 0: unknown."""
        return max((graph.planned_bytes for graph in self.of_round), default=0)

    @property
    def least_runtime(self) -> str:
        """First release of the format's runtime that loads all graphs. Empty: unknown."""
        return max(
            (graph.least_runtime for graph in self.graphs if graph.least_runtime), key=numbers_of, default=""
        )

    def pass_rows(self, phase: PhaseSpec) -> int:
        """Return the rows of each step of a phase over the data. Raises BundleError if its graph reads none."""
        for port in self.graph(phase.graph).inputs_of("batch"):
            if port.label == "0.x" and port.shape and port.shape[0] > 0:
                return port.shape[0]
        raise BundleError(
            f"phase {phase.name!r} passes over the data, and graph {phase.graph!r} reads no rows of them as "
            "'batch.0.x'; export the bundle again",
            phase=phase.name,
        )


_decoder = msgspec.msgpack.Decoder(Manifest)
"""Created at import: two threads that decode a type for the first time can crash msgspec."""


def encode_manifest(manifest: Manifest) -> bytes:
    """Return deterministic bytes: equal manifests have equal digests."""
    return msgspec.msgpack.encode(manifest, order="deterministic")


def decode_manifest(data: bytes) -> Manifest:
    """Return the manifest in ``data``. Raises BundleError if it is malformed, of another version, or inconsistent."""
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
    used += [reader.features] if isinstance(reader, SoundReader) and reader.features else []
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
