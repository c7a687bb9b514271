"""A profile as it travels: refused in one piece where it is not what was agreed."""

from __future__ import annotations

import math

import msgspec
import pytest
from msgspec.structs import replace

from edgefl.wire.bundle import profiles
from edgefl.wire.bundle.profiles import MemorySample, MemoryTimeline, TimeSpan
from tests.support.errors import ProtocolError, refuses
from tests.wire.bundle.example_profile import example_profile

GRAPH, CHUNK = example_profile().graphs[1], example_profile().io[0]
SPAN = TimeSpan(label="chunk 1 of 1", start_ms=0.0, end_ms=1.0)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"graphs": example_profile(ops=profiles.OPS + 1).graphs}, r"length <= 12 .*\.ops"),
        ({"timeline": example_profile(points=profiles.MOMENTS + 1).timeline}, r"length <= 200 .*\.moments"),
        (
            {"timeline": MemoryTimeline(moments=(), spans=(SPAN,) * (profiles.SPANS + 1))},
            r"length <= 256 .*\.spans",
        ),
        ({"graphs": (GRAPH,) * (profiles.GRAPHS + 1)}, r"length <= 256 .*\.graphs"),
        ({"io": (CHUNK,) * (profiles.CHUNKS + 1)}, r"length <= 256 .*\.io"),
        ({"io": (replace(CHUNK, units=("u",) * (profiles.UNITS + 1)),)}, r"length <= 1024 .*\.units"),
        ({"graphs": ()}, r"length >= 1 .*\.graphs"),
        ({"open_ms": math.nan}, "number of a profile is nan"),
        ({"graphs": (replace(GRAPH, energy_j=-math.inf),)}, "number of a profile is -inf"),
        (
            {"timeline": MemoryTimeline(moments=(MemorySample(1e300, 1),), spans=())},
            "number of a profile is 1e",
        ),
        ({"peak_bytes": (1 << 63) - 1}, "number of a profile is 9"),
        ({"model": "m" * (profiles.LETTERS + 1)}, "401 letters"),
    ],
)
def test_what_nobody_could_show_is_refused_by_name(changes: dict[str, object], told: str) -> None:
    with pytest.raises(ProtocolError, match=told):
        profiles.decode(profiles.encode(replace(example_profile(), **changes)))


def test_words_of_a_profile_are_printable() -> None:
    machine = replace(example_profile().machine, processor="x\x1b[31m\u202e8")
    found = profiles.decode(profiles.encode(replace(example_profile(), engine="on\nnx", machine=machine)))
    assert (found.engine, found.machine.processor) == ("on nx", "x [31m 8")


def test_the_largest_profile_that_is_agreed_reads_back_as_it_was() -> None:
    made = example_profile(points=profiles.MOMENTS, ops=profiles.OPS)
    assert made.step_ms == 17.5
    assert profiles.decode(profiles.encode(made)) == made


@pytest.mark.parametrize(
    "data", [b"", b"\xc1", msgspec.msgpack.encode({"v": 1}), msgspec.msgpack.encode([1])]
)
def test_malformed_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="malformed"):
        profiles.decode(data)


def test_another_version_is_refused_by_its_number() -> None:
    with refuses(ProtocolError, version=99):
        profiles.decode(msgspec.msgpack.encode({"v": 99}))
