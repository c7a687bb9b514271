"""What a bundle costs on a device: the result of ``edgefl profile``, also as devices send it to the server.

Small on purpose (some kilobytes, so that it fits one message): at most :data:`OPS` ops a graph and :data:`MOMENTS`
points of memory over time. Times are in milliseconds, memory is anonymous (what no file backs), in bytes.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import msgspec

from edgefl.system.sizes import mebibytes, size
from edgefl.wire.errors import ProtocolError
from edgefl.wire.mqtt.messages import MALFORMED, VERSION, Message
from edgefl.wire.printable import printable

OPS = 12
MOMENTS = 200
GRAPHS = SPANS = CHUNKS = 256
UNITS = 1024
LARGEST = 1e18
"""Of any number in a profile: whoever draws one need not fear larger ones."""
LETTERS = 400
"""Of any text in a profile."""
Kind = Literal["forward", "start", "step", "finish", "evaluate", "personalize"]
How = Literal["", "measured", "shared", "estimated"]
"""``measured``: by the engine's own profiler. ``shared``: by instruction of the program, and by MACs and bytes among the
nodes that run as one. ``estimated``: by MACs and bytes alone. Empty: nothing is known. A profile of a later release may
hold another word: whoever reads one takes any."""


class Times(msgspec.Struct, frozen=True, kw_only=True):
    """Of ``calls`` calls, after the first ones, which warm the engine up, were left out."""

    calls: int
    median_ms: float
    p90_ms: float
    min_ms: float


class Peak(msgspec.Struct, frozen=True, kw_only=True):
    """The most memory of a call by three measures; 0: unknown.

    ``planned_bytes``: what the exporter knew in advance. ``engine_bytes``: what the engine says that it holds for the
    graph (its arena). ``rss_bytes``: anonymous memory of the process while the graph was loaded and run, above the idle
    process.
    """

    planned_bytes: int = 0
    engine_bytes: int = 0
    rss_bytes: int = 0


class Split(msgspec.Struct, frozen=True, kw_only=True):
    """A call of a training graph by what it computes: the loss, its derivatives, the new weights and state.

    The median call's time and (``*_p90_ms``) that of the call which nine tenths do not exceed, by the same shares.
    """

    forward_ms: float
    backward_ms: float
    update_ms: float
    how: str
    forward_p90_ms: float
    backward_p90_ms: float
    update_p90_ms: float


class OpCost(msgspec.Struct, frozen=True, kw_only=True):
    """One op of a graph; ``module`` is the path of the module that it is of ("" where none is known)."""

    op: str
    module: str
    phase: str
    ms: float
    share: float
    macs: int
    how: str


class GraphProfile(msgspec.Struct, frozen=True, kw_only=True):
    """One graph. ``macs`` are multiply-accumulates of a call (0: unknown), ``energy_j`` joules of one; null: not exposed."""

    name: str
    kind: Kind
    artifact_bytes: int
    macs: int
    load_ms: float
    run: Times
    peak: Peak
    split: Split | None = None
    energy_j: float | None = None
    ops: tuple[OpCost, ...] = ()


class ChunkProfile(msgspec.Struct, frozen=True, kw_only=True):
    """One chunk of the multi-step forward pass over ``rows`` samples, whose weights come from disk as after a download.

    ``fetch_*``: the chunk's weights, ``load_ms``: its graph, ``read_*``: its input rows, ``write_*``: the record that the
    next one reads. ``forward_ms`` is all its runs together.
    """

    graph: str
    units: tuple[str, ...]
    rows: int
    fetch_bytes: int
    fetch_ms: float
    load_ms: float
    read_bytes: int
    read_ms: float
    forward_ms: float
    write_bytes: int
    write_ms: float


class Moment(msgspec.Struct, frozen=True, array_like=True):
    """Milliseconds since the profile began, and the anonymous memory then."""

    t_ms: float
    rss_bytes: int


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """What went on between two points in time, like "chunk 1 of 2"."""

    label: str
    start_ms: float
    end_ms: float


class Timeline(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of one round: the chunks, then training steps. Points are maxima of their part of the time."""

    moments: tuple[Moment, ...]
    spans: tuple[Span, ...]


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """What it was measured on; no names of hosts or people."""

    processor: str
    cores: int
    memory_bytes: int
    system: str


class BundleProfile(Message, frozen=True, kw_only=True):
    """One bundle on one engine of one machine. ``bundle`` is the SHA-256 of its manifest.

    ``parameters`` is what the tier trains, ``artifact_bytes`` all its graphs together.
    ``idle_bytes``: the process with its engine open, before the first graph. ``peak_bytes``: the highest of the graphs'
    peaks over it and of the timeline. ``energy_how`` says how energy was read, or why it was not.
    """

    bundle: str
    model: str
    program: str
    tier: str
    exchange: str = ""
    batch: int
    parameters: int
    engine: str
    engine_version: str
    threads: int
    machine: Machine
    idle_bytes: int
    peak_bytes: int
    open_ms: float
    artifact_bytes: int
    energy_how: str
    graphs: tuple[GraphProfile, ...]
    io: tuple[ChunkProfile, ...]
    timeline: Timeline

    @property
    def planned_bytes(self) -> int:
        """Return the plan of a round: of the largest of its graphs, without those for a device's own use of the model."""
        kinds = ("evaluate", "personalize")
        return max((graph.peak.planned_bytes for graph in self.graphs if graph.kind not in kinds), default=0)

    def __str__(self) -> str:
        lines = [
            f"{graph.name}: {graph.run.median_ms:.3f} ms (median of {graph.run.calls}), "
            f"{mebibytes(graph.peak.planned_bytes)} planned, {mebibytes(graph.peak.rss_bytes)} measured, "
            f"{size(graph.artifact_bytes)}"
            for graph in self.graphs
        ]
        what = (
            f"{self.model}, tier {self.tier}, algorithm {self.program} on {self.engine} {self.engine_version}"
        )
        return "\n".join([f"{what}, {self.threads} thread(s), batch {self.batch}", *lines])

    def graph(self, name: str) -> GraphProfile | None:
        return next((graph for graph in self.graphs if graph.name == name), None)

    @property
    def steps(self) -> tuple[GraphProfile, ...]:
        """The graphs of training steps, in the order of the phases."""
        return tuple(graph for graph in self.graphs if graph.kind == "step")

    @property
    def slowest(self) -> GraphProfile | None:
        """The graph of a training step; the one with the longest median where phases differ. None if nothing trains."""
        return max(self.steps, key=lambda graph: graph.run.median_ms, default=None)

    @property
    def step_ms(self) -> float:
        """Median of the :attr:`slowest` step."""
        return self.slowest.run.median_ms if self.slowest else 0.0


def encode(profile: BundleProfile) -> bytes:
    return msgspec.msgpack.encode(profile)


def decode(data: bytes) -> BundleProfile:
    """The profile in ``data``, with blanks for what cannot be printed; ProtocolError if it is malformed, of another
    version, or larger than agreed, also in its numbers."""
    try:
        version = msgspec.msgpack.decode(data, type=Message).v
        if version != VERSION:
            raise ProtocolError(
                f"a profile has version {version}, this is {VERSION}: install the same edgefl on both sides",
                version=version,
            )
        raw_profile = msgspec.msgpack.decode(data, type=BundleProfile)
        profile = msgspec.convert(_plain(msgspec.to_builtins(raw_profile)), BundleProfile)
    except MALFORMED as error:
        raise ProtocolError(
            f"a profile is malformed: {error}; install the same edgefl on both sides"
        ) from error
    for what, count, most in _counts(profile):
        if count > most:
            raise ProtocolError(f"a profile has {count} {what}, {most} at most; install a matching edgefl")
    if not profile.graphs:
        raise ProtocolError("a profile is of no graph; install the same edgefl on both sides")
    return profile


def _counts(profile: BundleProfile) -> tuple[tuple[str, int, int], ...]:
    return (
        ("graphs", len(profile.graphs), GRAPHS),
        ("ops of a graph", max((len(graph.ops) for graph in profile.graphs), default=0), OPS),
        ("chunks", len(profile.io), CHUNKS),
        ("units of a chunk", max((len(chunk.units) for chunk in profile.io), default=0), UNITS),
        ("points of time", len(profile.timeline.moments), MOMENTS),
        ("spans of time", len(profile.timeline.spans), SPANS),
    )


def _plain(value: Any) -> Any:
    """``value`` with printable texts; ProtocolError for a number that is not finite, or a text or number too large."""
    match value:
        case str():
            if len(value) > LETTERS:
                raise ProtocolError(f"a text of a profile has {len(value)} letters, {LETTERS} at most")
            return printable(value, LETTERS)
        case int() | float():
            if not math.isfinite(value) or abs(value) > LARGEST:
                raise ProtocolError(f"a number of a profile is {value:g}; measure again")
            return value
        case list() | tuple():
            return [_plain(each) for each in value]
        case dict():
            return {name: _plain(each) for name, each in value.items()}
    return value
