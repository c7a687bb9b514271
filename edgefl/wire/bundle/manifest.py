"""Manifest of a bundle: the graphs that a tier downloads, and the order in which the runtime runs them.

The manifest does not name an algorithm. Each graph lists its ports with their roles, and the runtime provides a value
for each role::

    weights, carry -> start -> state;
    for chunk in prefix:  weights of the chunk's units, batch -> forward -> record;
    for phase in phases:  phase.steps times: state, batch, data, noise, hyper -> state, metrics;
    weights, carry, state -> finish -> update, carry.

A device that adapts the model to its own data also runs ``weights, batch, hyper -> personalize -> weights``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

import msgspec

from edgefl.errors import BundleError
from edgefl.wire.blobs import BlobRef
from edgefl.wire.bundle.formats import FormatName, numbers_of
from edgefl.wire.bundle.graphs import Fault, Graph, Port, Role, check_graph
from edgefl.wire.bundle.readers import Reader, SoundSpec, TextSpec, find_problem
from edgefl.wire.limits import SEED_MAX
from edgefl.wire.mqtt.messages import MALFORMED, VERSION, Message

__all__ = [
    "PARTS",
    "PLANNED",
    "SAMPLE",
    "SEGMENTED",
    "Bucket",
    "DataSpec",
    "Draws",
    "FrozenChunk",
    "Graph",
    "Input",
    "Manifest",
    "PhaseSpec",
    "Port",
    "Role",
    "Split",
    "decode_manifest",
    "encode_manifest",
]

SAMPLE = "sample"
"""Part of a batch that holds the original samples, if ``x`` holds the output of the frozen units instead."""

PARTS = ("x", "y", "mask", SAMPLE)
"""Parts that any batch may have: input of the units, labels, mask of the rows that count, and original samples. Any other
part is an additional input of the model."""

SEGMENTED = 3
"""Version of a manifest with a graph in segments. An older device refuses it before it fetches any graph. No reader
accepts version 2 (the vector ``manifest_of_version_2``)."""

PLANNED = 4
"""Version of a manifest with a graph with planned outputs. An older device refuses it before it fetches any graph."""

HELD_OUT = 5
"""Version of a manifest with a :class:`Split`. An older device refuses it, because it would train on all rows. A bundle of
this version may also have what versions 3 and 4 introduced."""

Draws = Literal["walk", "draw", "length"]
"""Method by which a device chooses the rows of a batch (docs/protocol.md, Running a round)."""


class FrozenChunk(msgspec.Struct, frozen=True, kw_only=True):
    """Consecutive frozen units (stages of the model) that are fetched, run forward by one graph, and dropped together.

    Attributes:
        units: Names of the units, in order.
        graph: Name of the graph.
    """

    units: tuple[str, ...]
    graph: str


class Bucket(msgspec.Struct, frozen=True, kw_only=True):
    """Graph for batches in which no sample has more than ``length`` tokens."""

    length: int
    graph: str


class PhaseSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Phase of local training: a number of steps that run the same graph.

    Attributes:
        name: Name of the phase.
        graph: Name of the graph of a step.
        steps: Number of steps.
        over_data: Replace ``steps`` by one ordered pass over all local samples, fed as ``batch.0``. ``batch.0.mask`` is
            0 at rows that pad the last batch.
        shorter: Graphs for batches of short samples, by ascending length.
    """

    name: str
    graph: str
    steps: int
    over_data: bool = False
    shorter: tuple[Bucket, ...] = ()

    def graph_for(self, length: int) -> str:
        """Return the name of the graph for a batch whose longest sample has ``length`` tokens.

        It is the graph of the smallest sufficient length in :attr:`shorter`, or :attr:`graph` if none suffices.
        """
        return next((bucket.graph for bucket in self.shorter if bucket.length >= length), self.graph)


class Input(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Additional input of the model besides ``x``: port ``batch.<k>.<name>``, array ``name`` of the local data.

    Attributes:
        name: Name of the input.
        shape: Shape of one sample.
        dtype: Numpy's name of the dtype.
        below: Values are the whole numbers 0 .. below-1. 0: unbounded.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    below: int = 0


class DataSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Shape and encoding of a local sample.

    Attributes:
        shape: Shape of ``x`` for one sample.
        dtype: Dtype in which the graphs read ``x``. If it is floating, integer data become ``x * scale + shift``.
        classes: Number of classes.
        scale: Factor for integer data.
        shift: Summand for integer data.
        below: Whole numbers are 0 .. below-1, such as tokens of a vocabulary. 0: unbounded.
        others: Inputs of the model besides ``x``.
        names: Class names in the order of their numbers. Empty: classes have no names.
        reader: Reader of files that are no arrays, such as images. None: only arrays.
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
        """Blob of the text reader's tokenizer. None: samples are not read from text, or their tokens are bytes."""
        return self.reader.tokenizer if isinstance(self.reader, TextSpec) else None


class Split(msgspec.Struct, frozen=True, kw_only=True):
    """Division of the local rows into training rows and held-out rows, and the part that a bundle uses.

    A row is held out if the hash of ``seed`` and its content is below ``share`` (docs/protocol.md, Held-out rows). So it
    stays in its part when rows are added, and after a restart.

    Attributes:
        share: Expected share of the held-out rows, between 0 and 1.
        seed: Seed of the division, from 0 to 2^63 - 1.
        part: Rows that the bundle uses.
    """

    share: Annotated[float, msgspec.Meta(gt=0, lt=1)]
    seed: Annotated[int, msgspec.Meta(ge=0, le=SEED_MAX)]
    part: Literal["train", "held-out"]


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Table of contents of a bundle. The SHA-256 of its bytes names the bundle.

    Attributes:
        v: Version of the manifest.
        model: Name of the model.
        program: Name of the algorithm.
        tier: Name of the tier.
        parameters: Number of parameters that the tier trains.
        data: Shape and encoding of the local samples.
        batch: Rows of a batch.
        prefix: Frozen units (stages of the model) before the trained ones, in chunks.
        suffix: Names of the trained units.
        start: Graph that computes the initial state of a round.
        phases: Phases of local training, in order.
        finish: Graph that computes the update and the carry.
        evaluate: Graph that evaluates the model.
        hyper: Default of each scalar of the algorithm.
        graphs: All graphs of the bundle.
        codec: Encoding of an update's bytes. A device repeats it and ``codec_version`` in its update.
        codec_version: Version of ``codec``.
        draws: Method by which batches are chosen: one shuffled pass over the data, independent draws, or batches of
            similar length.
        personalize: Graph of one step that adapts the weights to a device's data. "": none.
        exchange: Name of this exchange, for display, if the algorithm has several. "": the main one.
        carry_exchanges: Number of completed rounds after which a carry expires. 0: it never expires.
        carry_needed: The device declines a round if it has no carry.
        carry_any_tier: True if the device may continue from a carry of another tier. Omitted if not set, so that other
            manifests keep their bytes.
        sources: Blob with the origin of each graph node (:mod:`edgefl.wire.bundle.sources`), fetched only for
            profiles.
        split: Division of the local rows. Unset: the bundle uses all rows.
    """

    v: int = VERSION
    model: str
    program: str
    tier: str
    parameters: int
    data: DataSpec
    batch: int
    prefix: tuple[FrozenChunk, ...]
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
    carry_any_tier: bool | msgspec.UnsetType = msgspec.UNSET
    sources: BlobRef | None = None
    split: Split | msgspec.UnsetType = (
        msgspec.UNSET
    )  # not written if unset: bundles without it keep their bytes

    def graph(self, name: str) -> Graph:
        """Return the graph ``name``. Raises BundleError if the manifest does not list it."""
        for graph in self.graphs:
            if graph.name == name:
                return graph
        raise BundleError(f"the manifest names graph {name!r} but does not list it; export the bundle again")

    @property
    def blobs(self) -> tuple[BlobRef, ...]:
        """References of the blobs in a bundle's file: graphs, variants, and the node origins and the tokenizer if there
        are any.
        """
        graphs = tuple(graph.blob for graph in self.graphs)
        variants = tuple(variant.blob for graph in self.graphs for variant in graph.variants)
        return (*graphs, *variants, *(ref for ref in (self.sources, self.data.tokenizer) if ref))

    @property
    def format(self) -> FormatName:
        """Format of all graphs."""
        return self.graphs[0].format

    @property
    def steps(self) -> int:
        """Local steps of a round. Excludes phases that pass over the data, because their steps depend on the device."""
        return sum(phase.steps for phase in self.phases if not phase.over_data)

    def steps_with(self, samples: int) -> tuple[int, ...]:
        """Return the number of steps of each phase (consecutive training steps), in order, with ``samples`` local samples.

        Raises:
            BundleError: A phase that passes over the data has a graph without input ``batch.0.x``
                (:meth:`pass_rows`).
        """
        return tuple(
            -(-samples // self.pass_rows(phase)) if phase.over_data else phase.steps for phase in self.phases
        )

    @property
    def of_round(self) -> tuple[Graph, ...]:
        """Graphs that a round runs, in order. Excludes those for evaluation and personalization."""
        names = [*(chunk.graph for chunk in self.prefix), self.start]
        names += [*(name for phase in self.phases for name in _graphs_of(phase)), self.finish]
        return tuple(self.graph(name) for name in dict.fromkeys(names))

    @property
    def planned_bytes(self) -> int:
        """Predicted peak of a round's anonymous memory, in bytes above the idle agent. 0: unknown."""
        return max((graph.planned_bytes for graph in self.of_round), default=0)

    @property
    def least_runtime(self) -> str:
        """Lowest release of the format's runtime that loads all graphs. "": unknown."""
        return max(
            (graph.least_runtime for graph in self.graphs if graph.least_runtime), key=numbers_of, default=""
        )

    def pass_rows(self, phase: PhaseSpec) -> int:
        """Return the number of rows (samples) that each step of ``phase`` reads.

        The phase passes once over all local data.

        Raises:
            BundleError: The phase's graph has no input ``batch.0.x`` with rows.
        """
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
    """Return the bytes of a manifest. Equal manifests give equal bytes, so their digests are equal."""
    return msgspec.msgpack.encode(manifest, order="deterministic")


def decode_manifest(data: bytes) -> Manifest:
    """Return the manifest in ``data``.

    Raises:
        BundleError: The bytes are malformed, have an unknown version, or describe an inconsistent manifest.
    """
    try:
        version = msgspec.msgpack.decode(data, type=Message).v
        if version not in (VERSION, SEGMENTED, PLANNED, HELD_OUT):
            raise BundleError(
                f"the manifest has version {version}, this runtime reads {VERSION}, {SEGMENTED}, {PLANNED} and {HELD_OUT}: "
                "install a matching edgefl",
                version=version,
            )
        manifest = _decoder.decode(data)
    except MALFORMED as error:
        raise BundleError(f"the manifest is malformed: {error}; export the bundle again") from error
    _check(manifest)
    return manifest


def _graphs_of(phase: PhaseSpec) -> list[str]:
    """Return the names of the graphs of a phase (consecutive training steps), including those for short samples."""
    return [phase.graph, *(bucket.graph for bucket in phase.shorter)]


def _check(manifest: Manifest) -> None:
    """Raise BundleError if the manifest names a graph that it does not list, or is inconsistent."""
    used = [manifest.start, manifest.finish, manifest.evaluate]
    used += [chunk.graph for chunk in manifest.prefix]
    used += [name for phase in manifest.phases for name in _graphs_of(phase)]
    used += [manifest.personalize] if manifest.personalize else []
    reader = manifest.data.reader
    used += [reader.features] if isinstance(reader, SoundSpec) and reader.features else []
    for name in used:
        manifest.graph(name)
    for problem, details in _faults(manifest):
        raise BundleError(f"{problem}; export the bundle again", **details)


def _faults(manifest: Manifest) -> Iterator[Fault]:
    """Yield (problem as a text, details for the error) for each inconsistency of a manifest.

    Raises:
        BundleError: A graph is inconsistent, or a phase over the data reads no rows.
    """
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
            if there and manifest.v not in (version, HELD_OUT):
                text = f"has {what} in a manifest of version {manifest.v}, which is {version} then"
                yield f"graph {graph.name!r} {text}", {"graph": graph.name}
    if (manifest.split is not msgspec.UNSET) != (manifest.v == HELD_OUT):
        text = (
            f"divides the rows by version {manifest.v} of a manifest, which is {HELD_OUT} then and only then"
        )
        yield f"tier {manifest.tier!r} {text}", {"tier": manifest.tier}
    if manifest.batch <= 0 or any(phase.steps < 0 for phase in manifest.phases):
        yield "batch and steps of a manifest must be positive", {}
    if manifest.carry_exchanges < 0:
        text = f"a carry cannot be good for {manifest.carry_exchanges} rounds"
        yield text, {"carry_exchanges": manifest.carry_exchanges}
    yield from _data_faults(manifest)


def _data_faults(manifest: Manifest) -> Iterator[Fault]:
    """Yield (problem as a text, details for the error) for each inconsistency of the data settings.

    Names that contain unprintable characters are reported, too.
    """
    data, reader = manifest.data, manifest.data.reader
    names = [each.name for each in data.others]
    if len({*names, *PARTS}) < len(names) + len(PARTS):
        text = f"each has a name of its own, and none is called {', '.join(PARTS)}"
        yield f"the inputs beside x are called {', '.join(names)}: {text}", {"names": names}
    if data.names and not len({*data.names}) == len(data.names) == data.classes:
        text = f"the data have {data.classes} classes and {len({*data.names})} different names for them"
        yield text, {"names": data.names}
    if reader is not None and (problem := find_problem(reader)):
        yield f"the reader of a manifest cannot be used: {problem}", {}
    shown = (manifest.model, manifest.program, manifest.tier, manifest.exchange, *names, *data.names)
    for name in (*shown, *(graph.name for graph in manifest.graphs)):
        if not name.isprintable():
            yield f"the name {name!r} in a manifest cannot be shown", {"name": name}
