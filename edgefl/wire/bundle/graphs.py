"""Graphs of a manifest: one artifact or several segments each, and the ports through which a device runs it.

A variant of a graph (:mod:`edgefl.wire.bundle.variants`) may read and write a state tensor in blocks of rows. Each
block is a port named after the tensor and its rows, such as ``state.weights.fc.weight[0:32]``. The blocks are views of
the tensor's memory, and together they cover it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import msgspec
import numpy as np

from edgefl.errors import BundleError
from edgefl.wire.bits import packed_bytes
from edgefl.wire.blobs import BlobRef
from edgefl.wire.bundle.formats import FormatName, is_release
from edgefl.wire.bundle.variants import MOST_VARIANTS, Variant, is_sound
from edgefl.wire.mqtt.messages import MALFORMED

_INTEGERS = frozenset(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))
DTYPES = _INTEGERS | {"bool", "float16", "float32", "float64"}
"""Dtypes of ports: those that numpy, ONNX and ExecuTorch all support."""

_CONTAINER = "edgefl-segments"

Fault = tuple[str, dict[str, object]]
"""Error text of an inconsistency, and details that become attributes of the error."""

Role = Literal[
    "weights", "state", "carry", "batch", "data", "noise", "hyper", "update", "metric", "record", "page"
]


class Port(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One input or output of a graph.

    Attributes:
        name: ``role.label``, such as ``weights.head.bias``.
        role: Role, which decides who provides or receives the value.
        dtype: Numpy's name of the dtype.
        shape: Static shape.
        mask: Number of bits if the value is a packed mask (uint8), which may be transmitted in another encoding. 0: no
            mask.
        ignored: Additional label of rows that do not count, such as -100.
    """

    name: str
    role: Role
    dtype: str
    shape: tuple[int, ...]
    mask: int = 0
    ignored: int | None = None

    @property
    def label(self) -> str:
        """Name without its role: ``head.bias`` for ``weights.head.bias``."""
        return self.name.partition(".")[2]

    @property
    def nbytes(self) -> int:
        """Size of the value in bytes."""
        return int(np.dtype(self.dtype).itemsize * np.prod(self.shape, dtype=np.int64))


class Segment(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One of several artifacts that together compute a graph and run one after the other.

    Ports of role ``page`` hold values that one segment returns and a later one reads. All other ports are ports of
    the graph.

    Attributes:
        inputs: Input ports.
        outputs: Output ports.
        in_place: Names of state ports whose new value may overwrite the memory of the old one in this segment.
    """

    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    in_place: tuple[str, ...] = ()


class Graph(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One computation that a device runs as a whole, with its artifact and its ports (named inputs
    and outputs).

    Attributes:
        name: Name within the manifest.
        format: Format of the artifact, which is also the name of the engine that runs it.
        blob: Artifact of the graph. With ``segments`` it contains one artifact per segment (:func:`split`).
        inputs: Input ports.
        outputs: Output ports.
        memory_budget: Peak memory in bytes, above the idle process, that the compiler was asked to stay below. 0:
            no budget.
        planned_bytes: Predicted peak of anonymous memory of a round with this graph, in bytes above the idle
            agent. Includes weights and state. 0: unknown.
        arena_bytes: Part of ``planned_bytes`` for onnxruntime's arena, which an agent may reserve as one block.
            0: unknown.
        in_place: Names of state ports whose new value may overwrite the memory of the old one.
        metrics: Metrics that are computed from the graph's sums (:mod:`edgefl.wire.metrics`), the headline metric
            first. Empty: unknown.
        activations: Dtype in which large activations are stored for the backward pass.
        variants: Alternative artifacts with the same ports. A device may choose the fastest.
        segments: Segments in the order in which they run. Empty: the graph is one artifact.
        planned_outputs: True if an ExecuTorch program returns outputs in its own planned memory, which its next
            run overwrites.
        least_runtime: Lowest release of the format's runtime that loads the graph, such as ``1.15``. "": unknown.
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
        """Return the input ports with this role."""
        return tuple(port for port in self.inputs if port.role == role)

    def outputs_of(self, role: Role) -> tuple[Port, ...]:
        """Return the output ports with this role."""
        return tuple(port for port in self.outputs if port.role == role)


_STREAM = re.compile(r"[0-9]{1,3}")
"""Number of the independent batch in a port name ``batch.<stream>.<part>``."""


def _consistent(port: Port) -> bool:
    """Return True if name, role, dtype, shape and mask size of the port (named input or output) agree."""
    named = port.name.partition(".")[0] == port.role
    if port.mask and (port.dtype, port.shape) != ("uint8", (packed_bytes(port.mask),)):
        return False
    stream, _, part = port.label.partition(".")
    numbered = port.role != "batch" or (_STREAM.fullmatch(stream) is not None and bool(part))
    return named and numbered and port.dtype in DTYPES and all(size >= 0 for size in port.shape)


def check_graph(graph: Graph) -> None:
    """Check the consistency of a graph's ports (inputs and outputs), variants and segments.

    Raises:
        BundleError: The fields of the graph contradict each other. The error names the first contradiction.
    """
    for problem, details in _faults(graph):
        raise BundleError(f"{problem}; export the bundle again", graph=graph.name, **details)


def _faults(graph: Graph) -> Iterator[Fault]:
    """Yield (problem as a text, details for the error) for each inconsistency of a graph."""
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
    for problem in _segment_faults(graph):
        yield f"the segments of graph {graph.name!r} do not fit together: {problem}", {}


def _all_ports(graph: Graph) -> Iterator[Port]:
    """Yield the ports (named inputs and outputs) of the graph, then those of its segments."""
    parts: tuple[Graph | Segment, ...] = (graph, *graph.segments)
    for part in parts:
        yield from part.inputs
        yield from part.outputs


def _segment_faults(graph: Graph) -> Iterator[str]:
    """Yield, as texts, the reasons for which the segments, run in their order, would not compute the graph."""
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


def join(artifacts: Sequence[bytes]) -> bytes:
    """Return the blob of a graph in segments: a MessagePack list of the artifacts. No engine accepts it as an artifact."""
    return msgspec.msgpack.encode((_CONTAINER, artifacts))


def is_joined(data: bytes) -> bool:
    """Return True if ``data`` begins like the result of :func:`join`."""
    mark = _CONTAINER.encode()
    return mark in data[: len(mark) + 8]


def split(data: bytes) -> list[bytes]:
    """Return the artifacts of the segments in order, from a blob that :func:`join` made.

    Raises:
        BundleError: ``data`` is no such blob.
    """
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


_ROWS = re.compile(r"(?P<whole>.+)\[(?P<start>\d{1,12}):(?P<stop>\d{1,12})\]")


class RowRange(msgspec.Struct, frozen=True):
    """Rows ``start`` to ``stop`` (exclusive) of the first axis of the port (named input or output) ``whole``."""

    whole: str
    start: int
    stop: int

    def place(self, address: int, shape: Sequence[int], itemsize: int) -> tuple[list[int], int]:
        """Return (shape of the row block, its memory address).

        Args:
            address: Address of the whole tensor.
            shape: Shape of the whole tensor.
            itemsize: Bytes of an entry.

        Raises:
            BundleError: The tensor does not have these rows. An engine would read or write any address unchecked.
        """
        if not shape or not self.start < self.stop <= shape[0]:
            raise BundleError(
                f"rows {self.start} to {self.stop} of {self.whole!r}, which has the shape {tuple(shape)}, do not exist: "
                "export the bundle again"
            )
        return [self.stop - self.start, *shape[1:]], address + self.start * math.prod(shape[1:]) * itemsize


def rows_of_port(name: str, start: int, stop: int) -> str:
    """Return the name of an input or output (port) that has only rows ``start`` to ``stop`` (exclusive) of the port
    ``name``.

    It has the form ``state.w[0:32]``.
    """
    return f"{name}[{start}:{stop}]"


def parse_rows(name: str) -> RowRange | None:
    """Return the rows that the name of a port (input or output) denotes, such as rows 0 to 32 for ``state.w[0:32]``.

    Return None if it is the name of a whole port.
    """
    found = _ROWS.fullmatch(name) if name.endswith("]") else None
    return RowRange(found["whole"], int(found["start"]), int(found["stop"])) if found else None


def cover(parts: Iterable[RowRange], count: int) -> bool:
    """Return True if ``parts``, in their order, cover rows 0 to ``count`` without gaps and overlaps."""
    at = 0
    for part in parts:
        if part.start != at or part.stop <= at:
            return False
        at = part.stop
    return at == count
