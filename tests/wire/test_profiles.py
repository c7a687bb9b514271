"""A profile as it travels: refused in one piece where it is not what was agreed."""

from __future__ import annotations

import msgspec
import pytest

from edgefl.wire import profiles
from edgefl.wire.errors import ProtocolError
from edgefl.wire.profiles import BundleProfile, GraphProfile, Machine, Moment, OpCost, Peak, Timeline, Times

OP = OpCost(op="Conv", module="stem", phase="forward", ms=1.0, share=0.5, macs=9, how="measured")


def profile(ops: int = 1, moments: int = 1) -> BundleProfile:
    graph = GraphProfile(
        name="train",
        kind="step",
        artifact_bytes=1,
        macs=9,
        load_ms=1.0,
        run=Times(calls=1, median_ms=2.0, p90_ms=2.0, min_ms=2.0),
        peak=Peak(),
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
        machine=Machine(processor="x", cores=1, memory_bytes=1, system="Linux"),
        idle_bytes=1,
        peak_bytes=1,
        open_ms=1.0,
        artifact_bytes=1,
        energy_how="",
        graphs=(graph,),
        io=(),
        timeline=Timeline(moments=(Moment(0.0, 1),) * moments, spans=()),
    )


def test_a_profile_survives_its_bytes() -> None:
    found = profiles.decode(profiles.encode(profile(profiles.OPS, profiles.MOMENTS)))
    assert found == profile(profiles.OPS, profiles.MOMENTS)
    assert found.step_ms == 2.0


@pytest.mark.parametrize("made", [profile(ops=profiles.OPS + 1), profile(moments=profiles.MOMENTS + 1)])
def test_more_ops_or_points_than_agreed_are_refused(made: BundleProfile) -> None:
    with pytest.raises(ProtocolError, match="more than"):
        profiles.decode(profiles.encode(made))


@pytest.mark.parametrize(
    "data", [b"", b"\xc1", msgspec.msgpack.encode({"v": 1}), msgspec.msgpack.encode([1])]
)
def test_malformed_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="malformed"):
        profiles.decode(data)


def test_another_version_is_refused_by_its_number() -> None:
    with pytest.raises(ProtocolError, match="version 99"):
        profiles.decode(msgspec.msgpack.encode({"v": 99}))
