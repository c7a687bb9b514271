"""A profile as it travels: refused in one piece where it is not what was agreed."""

from __future__ import annotations

import math

import msgspec
import pytest
from msgspec.structs import replace

from edgefl.errors import ProtocolError
from edgefl.wire.bundle import profiles
from edgefl.wire.bundle.profiles import (
    BundleProfile,
    CallTimes,
    GraphProfile,
    MachineInfo,
    MemoryTimeline,
    Moment,
    OpCost,
    PeakMemory,
    TimeSpan,
)
from tests.wire.bundle.example_profile import example_profile

OP = OpCost(op="Conv", module="stem", phase="forward", ms=1.0, share=0.5, macs=9, how="measured")


def profile(ops: int = 1, moments: int = 1) -> BundleProfile:
    graph = GraphProfile(
        name="train",
        kind="step",
        artifact_bytes=1,
        macs=9,
        load_ms=1.0,
        run=CallTimes(calls=1, median_ms=2.0, p90_ms=2.0, min_ms=2.0),
        peak=PeakMemory(),
        ops=(OP,) * ops,
    )
    return BundleProfile(
        bundle="00",
        model="m",
        program="p",
        tier="t",
        batch=1,
        parameters=1,
        engine="onnx",
        engine_version="1",
        threads=1,
        machine=MachineInfo(processor="x", cores=1, memory_bytes=1, system="Linux"),
        idle_bytes=1,
        peak_bytes=1,
        open_ms=1.0,
        artifact_bytes=1,
        energy_how="",
        graphs=(graph,),
        io=(),
        timeline=MemoryTimeline(moments=(Moment(0.0, 1),) * moments, spans=()),
    )


def test_a_profile_survives_its_bytes() -> None:
    found = profiles.decode(profiles.encode(profile(profiles.OPS, profiles.MOMENTS)))
    assert found == profile(profiles.OPS, profiles.MOMENTS)
    assert found.step_ms == 2.0


GRAPH, CHUNK = profile().graphs[0], example_profile().io[0]
SPAN = TimeSpan(label="chunk 1 of 1", start_ms=0.0, end_ms=1.0)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"graphs": profile(ops=profiles.OPS + 1).graphs}, "13 ops of a graph, 12 at most"),
        ({"timeline": profile(moments=profiles.MOMENTS + 1).timeline}, "201 points of time, 200 at most"),
        ({"timeline": MemoryTimeline(moments=(), spans=(SPAN,) * (profiles.SPANS + 1))}, "257 spans"),
        ({"graphs": (GRAPH,) * (profiles.GRAPHS + 1)}, "257 graphs"),
        ({"io": (CHUNK,) * (profiles.CHUNKS + 1)}, "257 chunks"),
        ({"io": (replace(CHUNK, units=("u",) * (profiles.UNITS + 1)),)}, "1025 units"),
        ({"graphs": ()}, "of no graph"),
        ({"open_ms": math.nan}, "number of a profile is nan"),
        ({"graphs": (replace(GRAPH, energy_j=-math.inf),)}, "number of a profile is -inf"),
        ({"timeline": MemoryTimeline(moments=(Moment(1e300, 1),), spans=())}, "number of a profile is 1e"),
        ({"peak_bytes": (1 << 63) - 1}, "number of a profile is 9"),
        ({"model": "m" * (profiles.LETTERS + 1)}, "401 letters"),
    ],
)
def test_what_nobody_could_show_is_refused_by_name(changes: dict[str, object], told: str) -> None:
    with pytest.raises(ProtocolError, match=told):
        profiles.decode(profiles.encode(replace(profile(), **changes)))


def test_words_of_a_profile_are_printable() -> None:
    machine = replace(profile().machine, processor="x\x1b[31m\u202e8")
    found = profiles.decode(profiles.encode(replace(profile(), engine="on\nnx", machine=machine)))
    assert (found.engine, found.machine.processor) == ("on nx", "x [31m 8")


def test_the_largest_profile_that_is_agreed_reads_back_as_it_was() -> None:
    made = example_profile(points=profiles.MOMENTS, ops=profiles.OPS)
    assert profiles.decode(profiles.encode(made)) == made


@pytest.mark.parametrize(
    "data", [b"", b"\xc1", msgspec.msgpack.encode({"v": 1}), msgspec.msgpack.encode([1])]
)
def test_malformed_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="malformed"):
        profiles.decode(data)


def test_another_version_is_refused_by_its_number() -> None:
    with pytest.raises(ProtocolError, match="version 99"):
        profiles.decode(msgspec.msgpack.encode({"v": 99}))
