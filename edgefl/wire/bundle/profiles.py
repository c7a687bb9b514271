"""Profile of a bundle: the time and memory measured on a device. Result of ``edgefl profile``, also sent by devices.

A profile has a few kilobytes, so that it fits one message: at most :data:`OPS` ops per graph, and :data:`MOMENTS`
points of memory over time. Times are in milliseconds. Memory is anonymous (not backed by files), in bytes.
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
"""Largest magnitude of a number in a profile, so that plots need no checks."""
LETTERS = 400
"""Most characters of a text in a profile."""
Kind = Literal["forward", "start", "step", "finish", "evaluate", "personalize"]
How = Literal["", "measured", "shared", "estimated"]
"""Origin of a number: ``measured`` by the engine's profiler, ``shared`` (measured time of fused nodes, divided by their
MACs and bytes), ``estimated`` from MACs and bytes alone, or "" for unknown. A reader accepts the values of later releases.
"""


class CallTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Distribution of the times of several calls of a graph, in milliseconds.

    Attributes:
        calls: Number of calls, without the warm-up calls before them.
        median_ms: Median.
        p90_ms: 90th percentile.
        min_ms: Shortest time.
    """

    calls: int
    median_ms: float
    p90_ms: float
    min_ms: float


class PeakMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Peak memory of a graph by three measures, in bytes. 0: unknown.

    Attributes:
        planned_bytes: Prediction of the exporter.
        engine_bytes: Size of the engine's arena, as the engine reports it.
        rss_bytes: Anonymous memory of the process above its idle state, while the graph was loaded and run.
    """

    planned_bytes: int = 0
    engine_bytes: int = 0
    rss_bytes: int = 0


class StageTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Time of a training graph by stage: forward (the loss), backward (its derivatives), update (new weights and state).

    The median and the 90th percentile of the call time are both divided in the same proportions. Times are in
    milliseconds.

    Attributes:
        how: Origin of the proportions (:data:`How`).
    """

    forward_ms: float
    backward_ms: float
    update_ms: float
    how: str
    forward_p90_ms: float
    backward_p90_ms: float
    update_p90_ms: float


class OpCost(msgspec.Struct, frozen=True, kw_only=True):
    """Cost of one op of a graph.

    Attributes:
        op: Type of the op.
        module: Path of the module that the op comes from, "" if unknown.
        phase: ``forward``, ``backward`` or ``update``.
        ms: Time per call.
        share: Part of the graph's time, from 0 to 1.
        macs: Multiply-accumulates per call.
        how: Origin of the time (:data:`How`).
    """

    op: str
    module: str
    phase: str
    ms: float
    share: float
    macs: int
    how: str


class GraphProfile(msgspec.Struct, frozen=True, kw_only=True):
    """Profile of one graph.

    Attributes:
        name: Name of the graph.
        kind: Purpose of the graph.
        artifact_bytes: Size of the artifact.
        macs: Multiply-accumulates of a call. 0: unknown.
        load_ms: Time to load the graph.
        run: Times of its calls.
        peak: Peak memory.
        split: Time by stage, for training graphs only.
        energy_j: Energy of a call in joules. None: not available.
        ops: Most expensive ops.
    """

    name: str
    kind: Kind
    artifact_bytes: int
    macs: int
    load_ms: float
    run: CallTimes
    peak: PeakMemory
    split: StageTimes | None = None
    energy_j: float | None = None
    ops: Annotated[tuple[OpCost, ...], msgspec.Meta(max_length=OPS)] = ()


class ChunkProfile(msgspec.Struct, frozen=True, kw_only=True):
    """Profile of one chunk of the forward pass over ``rows`` samples. Weights are read from disk, as after a download.

    Attributes:
        graph: Name of the graph.
        units: Names of the units (stages of the model).
        rows: Number of samples.
        fetch_bytes: Size of the chunk's weights.
        fetch_ms: Time to read the weights.
        load_ms: Time to load the graph.
        read_bytes: Size of the input rows.
        read_ms: Time to read the input rows.
        forward_ms: Time of all runs of the graph.
        write_bytes: Size of the activations that the next chunk reads.
        write_ms: Time to write these activations.
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


class MemorySample(msgspec.Struct, frozen=True, array_like=True):
    """Anonymous memory ``t_ms`` milliseconds after the profile began."""

    t_ms: float
    rss_bytes: int


class TimeSpan(msgspec.Struct, frozen=True, kw_only=True):
    """Labelled period of a timeline, such as "chunk 1 of 2"."""

    label: str
    start_ms: float
    end_ms: float


class MemoryTimeline(msgspec.Struct, frozen=True, kw_only=True):
    """Memory over time in one round: first the chunks, then training steps.

    Attributes:
        moments: Points in order. Each is the maximum since the point before.
        spans: Labelled periods.
    """

    moments: Annotated[tuple[MemorySample, ...], msgspec.Meta(max_length=MOMENTS)]
    spans: Annotated[tuple[TimeSpan, ...], msgspec.Meta(max_length=SPANS)]


class MachineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Machine of the measurement. It has no names of hosts or people."""

    processor: str
    cores: int
    memory_bytes: int
    system: str


class BundleProfile(Message, frozen=True, kw_only=True):
    """Profile of one bundle on one engine of one machine.

    Attributes:
        bundle: SHA-256 of the manifest.
        parameters: Number of parameters that the tier trains.
        artifact_bytes: Size of all graphs together.
        idle_bytes: Memory of the process with its engine open, before the first graph is loaded.
        peak_bytes: Largest of the graphs' peaks and of the timeline.
        open_ms: Time to open the engine.
        energy_how: Origin of the energy numbers, or the reason for their absence.
        io: Chunks of the forward pass.
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
        """Predicted peak memory of a round in bytes: the maximum over its graphs.

        Excludes the graphs for evaluation and personalization. 0: unknown.
        """
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
        """Return the profile of the graph ``name``, or None if the bundle has no such graph."""
        return next((graph for graph in self.graphs if graph.name == name), None)

    @property
    def steps(self) -> tuple[GraphProfile, ...]:
        """Profiles of the training steps' graphs, in the order of the phases."""
        return tuple(graph for graph in self.graphs if graph.kind == "step")

    @property
    def slowest(self) -> GraphProfile | None:
        """Profile of the training graph with the longest median step, or None if there is no training graph."""
        return max(self.steps, key=lambda graph: graph.run.median_ms, default=None)

    @property
    def step_ms(self) -> float:
        """Median time in milliseconds of a step of the :attr:`slowest` training graph. 0 if there is no training graph."""
        return self.slowest.run.median_ms if self.slowest else 0.0


def encode(profile: BundleProfile) -> bytes:
    """Return the msgpack bytes of a profile."""
    return msgspec.msgpack.encode(profile)


def decode(data: bytes) -> BundleProfile:
    """Return the profile in ``data``. Characters in its texts that cannot be printed become blanks.

    Raises:
        ProtocolError: The profile is malformed or has another version, or a text or number in it is too large.
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
