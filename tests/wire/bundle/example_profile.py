"""A profile with every field in use, as a device sends it; ``bundle`` is what it was asked for."""

from __future__ import annotations

from edgefl.wire.bundle.profiles import (
    BundleProfile,
    CallTimes,
    ChunkProfile,
    GraphProfile,
    MachineInfo,
    MemorySample,
    MemoryTimeline,
    OpCost,
    PeakMemory,
    StageTimes,
    TimeSpan,
)


def example_profile(bundle: str = "ab" * 32, points: int = 2, ops: int = 1) -> BundleProfile:
    """``points`` of memory over time, the highest the last one, and ``ops`` ops of the step."""
    times = CallTimes(calls=20, median_ms=17.5, p90_ms=19.25, min_ms=17.0)
    cost = OpCost(
        op="Conv", module="stage1.0.conv1", phase="backward", ms=4.5, share=0.25, macs=1 << 20, how="measured"
    )
    step = GraphProfile(
        name="train",
        kind="step",
        artifact_bytes=40000,
        macs=3 << 20,
        load_ms=12.5,
        run=times,
        peak=PeakMemory(planned_bytes=9 << 20, engine_bytes=8 << 20, rss_bytes=10 << 20),
        split=StageTimes(
            forward_ms=6.0,
            backward_ms=11.0,
            update_ms=0.5,
            how="measured",
            forward_p90_ms=6.5,
            backward_p90_ms=12.0,
            update_p90_ms=0.75,
        ),
        energy_j=0.125,
        ops=(cost,) * ops,
    )
    forward = GraphProfile(
        name="forward.stem",
        kind="forward",
        artifact_bytes=300,
        macs=0,
        load_ms=2.0,
        run=times,
        peak=PeakMemory(rss_bytes=1 << 20),
    )
    chunk = ChunkProfile(
        graph="forward.stem",
        units=("stem", "stage1"),
        rows=64,
        fetch_bytes=4096,
        fetch_ms=0.5,
        load_ms=2.0,
        read_bytes=1 << 16,
        read_ms=0.25,
        forward_ms=35.0,
        write_bytes=1 << 17,
        write_ms=0.75,
    )
    return BundleProfile(
        bundle=bundle,
        model="tiny",
        program="sgd",
        tier="weak",
        exchange="first",
        batch=32,
        parameters=6,
        engine="onnx",
        engine_version="1.22.0",
        threads=4,
        machine=MachineInfo(processor="Cortex-A76", cores=4, memory_bytes=4 << 30, system="Linux aarch64"),
        idle_bytes=40 << 20,
        peak_bytes=10 << 20,
        open_ms=120.5,
        artifact_bytes=40300,
        energy_how="power of the battery, the whole device included",
        graphs=(forward, step),
        io=(chunk,),
        timeline=MemoryTimeline(
            moments=tuple(
                MemorySample(t_ms=1.5 * at, rss_bytes=(40 << 20) + (at << 10)) for at in range(points)
            ),
            spans=(TimeSpan(label="chunk 1 of 1", start_ms=0.0, end_ms=1.5),),
        ),
    )
