"""Measured cost of a bundle on a device: the result of ``edgefl profile``, also as devices send it to the server.

A profile has some kilobytes, so that it fits one message: at most :data:`OPS` ops a graph and :data:`MOMENTS` points of
memory over time. Times are in milliseconds. Memory is anonymous (not backed by files), in bytes.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

import msgspec

from edgefl.errors import ProtocolError
from edgefl.system.sizes import mebibytes, size
from edgefl.wire.mqtt.messages import MALFORMED, VERSION, Message
from edgefl.wire.text import printable

OPS = 12
MOMENTS = 200
GRAPHS = SPANS = CHUNKS = 256
UNITS = 1024
LARGEST = 1e18
"""Bound of every number in a profile, so that plots need no check."""
LETTERS = 400
"""Most letters of a text in a profile."""
Kind = Literal["forward", "start", "step", "finish", "evaluate", "personalize"]
How = Literal["", "measured", "shared", "estimated"]
"""Source of a figure. ``measured``: the engine's own profiler. ``shared``: the instruction's time, divided by MACs and bytes
among fused nodes. ``estimated``: MACs and bytes alone. Empty: unknown. A reader accepts any value of a later release.
"""


class CallTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Times of ``calls`` calls, without the first ones, which warm the engine up."""

    calls: int
    median_ms: float
    p90_ms: float
    min_ms: float


class PeakMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Peak memory of a call by three measures, in bytes. 0: unknown.

    Attributes:
        planned_bytes: Prediction of the exporter.
        engine_bytes: The engine's own report for the graph (its arena).
        rss_bytes: Anonymous memory of the process above its idle state, while the graph was loaded and run.
    """

    planned_bytes: int = 0
    engine_bytes: int = 0
    rss_bytes: int = 0


class StepSplit(msgspec.Struct, frozen=True, kw_only=True):
    """Time of a training graph by stage: the loss, its derivatives, the new weights and state.

    The median call's time and (``*_p90_ms``) that of the 90th percentile, divided by the same shares.
    """

    forward_ms: float
    backward_ms: float
    update_ms: float
    how: str
    forward_p90_ms: float
    backward_p90_ms: float
    update_p90_ms: float


class OpCost(msgspec.Struct, frozen=True, kw_only=True):
    """One op of a graph. ``module`` is the path of its module, "" if unknown."""

    op: str
    module: str
    phase: str
    ms: float
    share: float
    macs: int
    how: str


class GraphProfile(msgspec.Struct, frozen=True, kw_only=True):
    """One graph.

    ``macs`` are multiply-accumulates of a call (0: unknown), ``energy_j`` joules of one (None: not available).
    """

    name: str
    kind: Kind
    artifact_bytes: int
    macs: int
    load_ms: float
    run: CallTimes
    peak: PeakMemory
    split: StepSplit | None = None
    energy_j: float | None = None
    ops: Annotated[tuple[OpCost, ...], msgspec.Meta(max_length=OPS)] = ()


class ChunkProfile(msgspec.Struct, frozen=True, kw_only=True):
    """One chunk of the multi-step forward pass over ``rows`` samples, with weights from disk as after a download.

    Attributes:
        fetch_ms: Reading the chunk's weights.
        load_ms: Loading its graph.
        read_ms: Reading its input rows.
        forward_ms: All its runs together.
        write_ms: Writing the record that the next chunk reads.
    """

    graph: str
    units: Annotated[tuple[str, ...], msgspec.Meta(max_length=UNITS)]
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
    """Milliseconds since the profile began, and the anonymous memory at that time."""

    t_ms: float
    rss_bytes: int


class TimeSpan(msgspec.Struct, frozen=True, kw_only=True):
    """Labelled period of time, such as "chunk 1 of 2"."""

    label: str
    start_ms: float
    end_ms: float


class MemoryTimeline(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of one round: the chunks, then training steps. Points are maxima of their period."""

    moments: Annotated[tuple[Moment, ...], msgspec.Meta(max_length=MOMENTS)]
    spans: Annotated[tuple[TimeSpan, ...], msgspec.Meta(max_length=SPANS)]


class MachineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Machine of the measurement, without names of hosts or people."""

    processor: str
    cores: int
    memory_bytes: int
    system: str


class BundleProfile(Message, frozen=True, kw_only=True):
    """Profile of one bundle on one engine of one machine.

    Attributes:
        bundle: SHA-256 of its manifest.
        parameters: Trained parameters of the tier.
        artifact_bytes: All its graphs together.
        idle_bytes: The process with its engine open, before the first graph.
        peak_bytes: Highest of the graphs' peaks and of the timeline.
        energy_how: Source of the energy figures, or the reason for their absence.
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
    machine: MachineInfo
    idle_bytes: int
    peak_bytes: int
    open_ms: float
    artifact_bytes: int
    energy_how: str
    graphs: Annotated[tuple[GraphProfile, ...], msgspec.Meta(min_length=1, max_length=GRAPHS)]
    io: Annotated[tuple[ChunkProfile, ...], msgspec.Meta(max_length=CHUNKS)]
    timeline: MemoryTimeline

    @property
    def planned_bytes(self) -> int:
        """Planned memory of a round: the largest of its graphs, without those for a device's own use of the model."""
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
        """Graphs of training steps, in the order of the phases."""
        return tuple(graph for graph in self.graphs if graph.kind == "step")

    @property
    def slowest(self) -> GraphProfile | None:
        """Training graph with the longest median step, or None if nothing trains."""
        return max(self.steps, key=lambda graph: graph.run.median_ms, default=None)

    @property
    def step_ms(self) -> float:
        """Median of the :attr:`slowest` step."""
        return self.slowest.run.median_ms if self.slowest else 0.0


def encode(profile: BundleProfile) -> bytes:
    return msgspec.msgpack.encode(profile)


def decode(data: bytes) -> BundleProfile:
    """Return the profile in ``data``, with blanks for characters that cannot be printed.

    Raises:
        ProtocolError: The profile is malformed, of another version, or exceeds the limits above.
    """
    try:
        version = msgspec.msgpack.decode(data, type=Message).v
        if version != VERSION:
            raise ProtocolError(
                f"a profile has version {version}, this is {VERSION}: install the same edgefl on both sides",
                version=version,
            )
        raw_profile = msgspec.msgpack.decode(data, type=BundleProfile)
        return msgspec.convert(_plain(msgspec.to_builtins(raw_profile)), BundleProfile)
    except MALFORMED as error:
        raise ProtocolError(
            f"a profile is malformed: {error}; install the same edgefl on both sides"
        ) from error


def _plain(value: Any) -> Any:
    """Return ``value`` with printable texts. Raises ProtocolError for a text or number that is too large or not finite."""
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
