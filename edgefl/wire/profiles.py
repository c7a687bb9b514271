"""What a bundle costs on a device: the result of ``edgefl profile``, also as devices send it to the server.

Small on purpose (some kilobytes, so that it fits one message): at most :data:`OPS` ops a graph and :data:`MOMENTS`
points of memory over time. Times are in milliseconds, memory is resident set size in bytes.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from edgefl.wire.errors import ProtocolError
from edgefl.wire.messages import MALFORMED, VERSION, Message

OPS = 12
MOMENTS = 200
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
    graph (its arena). ``rss_bytes``: of the process while the graph was loaded and run, over the idle process.
    """

    planned_bytes: int = 0
    engine_bytes: int = 0
    rss_bytes: int = 0


class Split(msgspec.Struct, frozen=True, kw_only=True):
    """The median call of a training graph by what it computes: the loss, its derivatives, the new weights and state."""

    forward_ms: float
    backward_ms: float
    update_ms: float
    how: str


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
    """Milliseconds since the profile began, and the resident memory then."""

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

    ``macs`` are those of a whole step, ``parameters`` what the tier trains, ``down_bytes`` all artifacts together.
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

    def graph(self, name: str) -> GraphProfile | None:
        return next((graph for graph in self.graphs if graph.name == name), None)

    @property
    def steps(self) -> tuple[GraphProfile, ...]:
        """The graphs of training steps, in the order of the phases."""
        return tuple(graph for graph in self.graphs if graph.kind == "step")

    @property
    def step_ms(self) -> float:
        """Median of the graph that a step takes; the slowest where phases differ."""
        return max((graph.run.median_ms for graph in self.steps), default=0.0)


def encode(profile: BundleProfile) -> bytes:
    return msgspec.msgpack.encode(profile)


def decode(data: bytes) -> BundleProfile:
    """The profile in ``data``; ProtocolError if it is malformed, of another version, or larger than agreed."""
    try:
        version = msgspec.msgpack.decode(data, type=Message).v
        if version != VERSION:
            raise ProtocolError(
                f"a profile has version {version}, this is {VERSION}: install the same edgefl on both sides",
                version=version,
            )
        profile = msgspec.msgpack.decode(data, type=BundleProfile)
    except MALFORMED as error:
        raise ProtocolError(
            f"a profile is malformed: {error}; install the same edgefl on both sides"
        ) from error
    if len(profile.timeline.moments) > MOMENTS or any(len(graph.ops) > OPS for graph in profile.graphs):
        raise ProtocolError(
            f"a profile has more than {MOMENTS} points of time or {OPS} ops of a graph; install a matching edgefl"
        )
    return profile
