"""A graph as a manifest tells it: one artifact or several segments, and the ports by which a device calls it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import msgspec
import numpy as np

from edgefl.wire.bits import packed_bytes
from edgefl.wire.blobs import BlobRef
from edgefl.wire.bundle.formats import FormatName
from edgefl.wire.bundle.releases import is_release
from edgefl.wire.bundle.variants import MOST_VARIANTS, Variant, is_sound
from edgefl.wire.errors import BundleError
from edgefl.wire.mqtt.messages import MALFORMED

_INTEGERS = frozenset(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))
DTYPES = _INTEGERS | {"bool", "float16", "float32", "float64"}
"""What a port may hold: the types that numpy, ONNX and ExecuTorch share."""

_CONTAINER = "edgefl-segments"

Fault = tuple[str, dict[str, object]]
"""What is wrong, and the values that an error about it has as attributes."""

Role = Literal[
    "weights", "state", "carry", "batch", "data", "noise", "hyper", "update", "metric", "record", "page"
]


class Port(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One input or output of a graph. ``name`` starts with the role; ``shape`` is static; ``dtype`` is numpy's name.

    ``mask``: entries of a packed mask (uint8), which may travel in another form. 0: it is none.
    ``ignored``: of labels, a whole number that stands beside the classes and counts for nothing, such as -100.
    """

    name: str
    role: Role
    dtype: str
    shape: tuple[int, ...]
    mask: int = 0
    ignored: int | None = None

    @property
    def label(self) -> str:
        """The name without its role: ``weights.head.bias`` -> ``head.bias``."""
        return self.name.partition(".")[2]

    @property
    def nbytes(self) -> int:
        return int(np.dtype(self.dtype).itemsize * np.prod(self.shape, dtype=np.int64))


class Segment(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One of the artifacts that a graph runs one after another. Ports of the role ``page`` are values that an earlier
    segment leaves and a later one reads; all others are ports of the graph."""

    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    in_place: tuple[str, ...] = ()


class Graph(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One artifact and its ports. ``format`` names the engine that runs it.

    ``memory_budget`` is the peak in bytes, over the idle process, that the artifact was compiled to stay under. 0: none.
    ``planned_bytes`` is the anonymous memory that a round around this graph takes above the idle agent at its peak, weights
    and state included. 0: unknown. ``arena_bytes``: the part of these that onnxruntime's arena takes, which an agent may
    reserve as one block. 0: unknown. ``in_place`` names the state ports whose new value may be written into the memory of
    the old one. ``metrics``: what the sums of an evaluation make (:mod:`edgefl.wire.metrics`), the one that people see
    first. Empty: unknown. ``activations``: the type in which large values wait for the backward pass. ``variants``: other
    forms, of which a device may take the fastest. ``segments``: the blob holds an artifact for each (:func:`split`), which
    run in this order; empty: it is one artifact. ``planned_outputs``: of format executorch, each output lies in memory that
    the program planned, where the next run writes over it. ``least_runtime``: first release of the format's runtime that
    loads it, such as ``1.15``; empty: unknown.
    """

    name: str
    format: FormatName
    blob: BlobRef
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    memory_budget: int = 0
    planned_bytes: int = 0
    arena_bytes: int = 0
    in_place: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ()
    activations: str = "float32"
    variants: tuple[Variant, ...] = ()
    segments: tuple[Segment, ...] = ()
    planned_outputs: bool = False
    least_runtime: str = ""

    def inputs_of(self, role: Role) -> tuple[Port, ...]:
        return tuple(port for port in self.inputs if port.role == role)

    @property
    def is_repeated(self) -> bool:
        """Whether it is run for one batch after another, alone or as a segment: what reads none is run once in a round."""
        return any(port.role in ("batch", "page") for port in (*self.inputs, *self.outputs))

    def outputs_of(self, role: Role) -> tuple[Port, ...]:
        return tuple(port for port in self.outputs if port.role == role)


_STREAM = re.compile(r"[0-9]{1,3}")
"""Which of a step's independent batches a port ``batch.<stream>.<part>`` belongs to."""


def _consistent(port: Port) -> bool:
    named = port.name.partition(".")[0] == port.role
    if port.mask and (port.dtype, port.shape) != ("uint8", (packed_bytes(port.mask),)):
        return False
    stream, _, part = port.label.partition(".")
    numbered = port.role != "batch" or (_STREAM.fullmatch(stream) is not None and bool(part))
    return named and numbered and port.dtype in DTYPES and all(size >= 0 for size in port.shape)


def check_graph(graph: Graph) -> None:
    """Raise BundleError if the graph contradicts itself."""
    for problem, details in _faults(graph):
        raise BundleError(f"{problem}; export the bundle again", graph=graph.name, **details)


def _faults(graph: Graph) -> Iterator[Fault]:
    for ports in (graph.inputs, graph.outputs):
        names = [port.name for port in ports]
        if len({*names}) < len(names):
            twice = next(name for name in sorted(names) if names.count(name) > 1)
            yield f"graph {graph.name!r} has port {twice!r} twice", {"port": twice}
    for port in _all_ports(graph):
        if not _consistent(port):
            yield f"port {port.name!r} of graph {graph.name!r} is inconsistent", {"port": port.name}
    rewritten = set(graph.inputs_of("state")) & set(graph.outputs_of("state"))
    for wrong in sorted(set(graph.in_place) - {port.name for port in rewritten}):
        text = "in place, which it does not read and return as one state port"
        yield f"graph {graph.name!r} is to write {wrong!r} {text}", {"port": wrong}
    for variant in graph.variants:
        if not is_sound(variant):
            yield f"variant {variant.name!r} of graph {graph.name!r} is inconsistent", {}
    names = [variant.name for variant in graph.variants]
    if len(names) > MOST_VARIANTS or len({*names}) < len(names):
        text = f"each has a name of its own, and there are no more than {MOST_VARIANTS}"
        yield f"the variants of graph {graph.name!r} are called {', '.join(map(repr, names))}: {text}", {}
    if graph.least_runtime and not is_release(graph.least_runtime):
        text = f"needs release {graph.least_runtime!r} of its runtime, which should be numbers with dots between them"
        yield f"graph {graph.name!r} {text}", {"least_runtime": graph.least_runtime}
    if graph.planned_bytes < 0:
        text = f"is planned to need {graph.planned_bytes} bytes"
        yield f"graph {graph.name!r} {text}", {"planned_bytes": graph.planned_bytes}
    if graph.planned_outputs and (graph.format != "executorch" or graph.segments):
        text = "which only a program of format executorch has, and none in segments"
        yield f"graph {graph.name!r} has planned outputs, {text}", {}
    for problem in _disorder(graph):
        yield f"the segments of graph {graph.name!r} do not fit together: {problem}", {}


def _all_ports(graph: Graph) -> Iterator[Port]:
    parts: tuple[Graph | Segment, ...] = (graph, *graph.segments)
    for part in parts:
        yield from part.inputs
        yield from part.outputs


def _disorder(graph: Graph) -> Iterator[str]:
    """Why the segments of a graph, run in their order, are not the graph."""
    if not graph.segments:
        yield from (
            f"it has none, and the port {port.name!r}" for port in _all_ports(graph) if port.role == "page"
        )
        return
    given, wanted = set(graph.inputs), set(graph.outputs)
    made: set[Port] = set()
    for segment in graph.segments:
        for ports in (segment.inputs, segment.outputs):
            names = [port.name for port in ports]
            yield from (f"one has {name!r} twice" for name in sorted({*names}) if names.count(name) > 1)
    rewritten: set[str] = set()
    for segment in graph.segments:
        read, new = set(segment.inputs), set(segment.outputs)
        for name in _names(read - given - made):
            yield f"one reads {name!r}, which neither the graph has nor an earlier one leaves"
        for name in sorted(rewritten & {port.name for port in read}):
            yield f"one reads {name!r}, which an earlier one has written over"
        for name in sorted({*_names(new)} & {*_names(made)}):
            yield f"two leave {name!r}"
        for name in _names({port for port in new - wanted if port.role != "page"}):
            yield f"one leaves {name!r}, which is no output of the graph"
        for name in sorted({*segment.in_place} - ({*_names(new & read)} & {*graph.in_place})):
            yield f"one is to write {name!r} in place, which it or the graph does not"
        made |= new
        rewritten |= {*segment.in_place}
    for name in _names(wanted - made):
        yield f"none leaves {name!r}"


def _names(ports: Iterable[Port]) -> list[str]:
    return sorted(port.name for port in ports)


def joined(artifacts: Sequence[bytes]) -> bytes:
    """The blob of a graph in segments: MessagePack of a name and the list of their artifacts, which no engine takes for one
    of its own."""
    return msgspec.msgpack.encode((_CONTAINER, artifacts))


def is_joined(data: bytes) -> bool:
    """Whether ``data`` begins as what :func:`joined` makes."""
    mark = _CONTAINER.encode()
    return mark in data[: len(mark) + 8]


def split(data: bytes) -> list[bytes]:
    """The artifacts of the segments; BundleError if ``data`` is no such blob."""
    try:
        kind, artifacts = msgspec.msgpack.decode(data, type=tuple[str, list[bytes]])
    except MALFORMED as error:
        raise BundleError(
            f"the segments of a graph cannot be read: {error}; export the bundle again"
        ) from error
    if kind != _CONTAINER:
        raise BundleError(
            "a blob that should hold the segments of a graph holds something else; export the bundle again"
        )
    return artifacts
