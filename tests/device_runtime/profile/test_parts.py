"""From times of nodes to ops and phases; memory over time; energy."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from edgefl.wire.bundle import profiles
from edgefl.wire.bundle.manifest import Port
from edgefl.wire.bundle.profiles import MOMENTS, CallTimes, MemorySample
from edgefl.wire.bundle.sources import OpOrigin
from edgefl.wire.mqtt import messages
from edgefl_device.profile.measure import ops
from edgefl_device.profile.measure.graph import summary
from edgefl_device.profile.measure.inputs import RandomInputs
from edgefl_device.profile.measure.meters import (
    Battery,
    MemorySampler,
    NoMeter,
    RaplCounters,
    open_meter,
    thinned,
)
from edgefl_device.profile.measure.onnx_trace import read
from edgefl_device.profile.measure.ops import NodeTime
from edgefl_device.profile.request import answer_with
from tests.device_runtime import tiny
from tests.wire.bundle.example_profile import example_profile

NODES = {
    "Conv_1": OpOrigin("Conv", "forward", "stem", 100, 40),
    "Conv_2": OpOrigin("Conv", "backward", "stem", 300, 80),
    "Sub_3": OpOrigin("Sub", "update", "stem", 0, 30),
}


def test_a_fused_node_counts_as_the_first_that_the_bundle_knows() -> None:
    timed = [
        NodeTime("fused Conv_1/Relu_9", "FusedConv", 1.0),
        NodeTime("Conv_2", "Conv", 2.0),
        NodeTime("Reorder", "R", 1.0),
    ]
    parts = ops.measured(timed, NODES)
    assert [(part.share, part.node) for part in parts] == [
        (0.25, NODES["Conv_1"]),
        (0.5, NODES["Conv_2"]),
        (0.25, None),
    ]


def test_phases_add_up_to_the_median() -> None:
    parts = [
        ops.TimeShare("Conv", 0.2, NODES["Conv_1"]),
        ops.TimeShare("R", 0.5, None),
        ops.TimeShare("Sub", 0.3, NODES["Sub_3"]),
    ]
    run = CallTimes(calls=5, median_ms=10.0, p90_ms=20.0, min_ms=9.0)
    found = ops.split(parts, run, "measured")
    assert found is not None
    assert (found.forward_ms, found.backward_ms, found.update_ms) == (4.0, 0.0, 6.0)
    assert (found.forward_p90_ms, found.backward_p90_ms, found.update_p90_ms) == (8.0, 0.0, 12.0)
    assert ops.split([ops.TimeShare("R", 1.0, None)], run, "measured") is None


def test_estimates_share_a_call_by_multiplications_and_bytes() -> None:
    work = [100 + 4 * 40, 300 + 4 * 80, 4 * 30]
    assert [part.share for part in ops.estimated(NODES)] == pytest.approx([each / sum(work) for each in work])


def test_the_time_of_an_instruction_is_shared_by_the_nodes_that_it_runs() -> None:
    nodes = {
        "0:mm_1": OpOrigin("mm", "forward", "stem", 90, 0),
        "0:add_1": OpOrigin("add", "backward", "stem", 10, 0),
        "3:sub_1": OpOrigin("sub", "update", "stem", 0, 7),
    }
    timed = [NodeTime(str(at), "", ms) for at, ms in enumerate([4.0, 0.5, 0.5, 5.0])]
    parts = ops.shared(timed, ops.by_instruction(nodes))
    assert [(part.op, part.share) for part in parts] == [
        ("mm", pytest.approx(0.45)),  # with the two copies that follow
        ("add", pytest.approx(0.05)),
        ("sub", pytest.approx(0.5)),
    ]


def test_nodes_without_instructions_in_their_names_are_in_no_group() -> None:
    assert ops.by_instruction(NODES) == {}
    assert ops.by_instruction({}) == {}


def test_the_costliest_ops_are_grouped_ordered_and_at_most_twelve() -> None:
    parts = [ops.TimeShare("Op", (n + 1) / 400, OpOrigin("Op", "forward", f"m{n}", n, 0)) for n in range(20)]
    parts.append(ops.TimeShare("Op", 0.4, OpOrigin("Op", "forward", "m0", 5, 0)))
    found = ops.costliest(parts, 100.0, "measured")
    assert len(found) == 12
    assert (found[0].module, found[0].ms, found[0].macs) == ("m0", 40.25, 5)
    assert [op.share for op in found] == sorted((op.share for op in found), reverse=True)


def ran(name: str, at: int, microseconds: int, op: str = "Add", held: int = 0) -> dict[str, object]:
    """A node as ONNX Runtime's profiler tells it."""
    args = {"op_name": op, "mem_arena_held": str(held)}
    return {"cat": "Node", "name": f"{name}_kernel_time", "ts": at, "dur": microseconds, "args": args}


def test_nodes_in_the_body_of_a_loop_are_not_counted_beside_it() -> None:
    call = [
        ran("Mul_1", 0, 100, "Mul"),
        ran("Mul_1", 110, 400, "MatMul", held=80),  # of the body, which may use a name again
        ran("Tanh_1", 510, 300, "Tanh"),
        ran("Scan_2", 105, 800, "Scan"),
        ran("Neg_3", 905, 200, "Neg"),
    ]
    later = [{**event, "ts": int(str(event["ts"])) + 5000} for event in call]
    found = read([*call, *later], calls=1)
    assert {node.name: (node.op, node.ms) for node in found.nodes} == {
        "Mul_1": ("Mul", 0.1),
        "Scan_2": ("Scan", 0.8),
        "Neg_3": ("Neg", 0.2),
    }
    assert found.engine_bytes == 80


def test_a_trace_takes_medians_behind_the_first_call() -> None:
    events = [
        ran("Add_1", at, took, held=held)
        for at, took, held in [(0, 9000, 10), (10_000, 1000, 70), (20_000, 3000, 20), (30_000, 2000, 20)]
    ]
    found = read([{"cat": "Session", "name": "model_run", "dur": 1}, *events], calls=3)
    assert found.nodes == (NodeTime("Add_1", "Add", 2.0),)
    assert found.engine_bytes == 70


def test_p90_is_the_least_that_nine_tenths_do_not_exceed() -> None:
    found = summary([float(number) for number in range(10, 0, -1)])
    assert (found.calls, found.median_ms, found.p90_ms, found.min_ms) == (10, 5.5, 9.0, 1.0)
    assert summary([3.0]).p90_ms == 3.0


def test_thinning_keeps_the_peak_and_the_order() -> None:
    seen = [MemorySample(float(t), 1000 + t) for t in range(5000)]
    seen[1234] = MemorySample(1234.0, 99_999)
    found = thinned(seen, 200)
    assert len(found) <= 200
    assert max(moment.rss_bytes for moment in found) == 99_999
    assert [moment.t_ms for moment in found] == sorted(moment.t_ms for moment in found)


def wait_for(seen: Callable[[], bool]) -> None:
    end = time.perf_counter() + 60
    while not seen():
        assert time.perf_counter() < end, "the sampler did not see it within a minute"
        time.sleep(0.001)


def test_the_sampler_sees_memory_while_it_is_held() -> None:
    with MemorySampler() as sampler:
        wait_for(lambda: bool(sampler.moments))
        before, idle = sampler.now_ms, sampler.moments[-1].rss_bytes
        # Of the system: the heap may have kept as much of a test before.
        with mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as block:
            block.write(b"\1" * len(block))
            wait_for(lambda: sampler.moments[-1].rss_bytes - idle > 50 << 20)
    found = sampler.moments
    assert max(m.rss_bytes for m in found) - idle > 50 << 20
    assert found[-1].t_ms > before


def test_a_long_watch_keeps_its_peak_and_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(
        MemorySampler, "_anonymous", lambda _: asked.append(1) or (9 << 20 if len(asked) == 50 else 1 << 20)
    )
    monkeypatch.setattr("edgefl_device.profile.measure.meters._PERIOD_S", 0.0)
    with MemorySampler() as sampler:
        wait_for(lambda: len(asked) > 20_000)

    assert len(sampler._seen) <= 8 * MOMENTS + 1
    assert max(moment.rss_bytes for moment in sampler.moments) == 9 << 20


def counter(system: Path, number: int, energy: int) -> Path:
    folder = system / "powercap" / f"intel-rapl:{number}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "energy_uj").write_text(f"{energy}\n")
    (folder / "max_energy_range_uj").write_text("1000000\n")
    return folder


def test_rapl_counters_add_up_and_wrap_around(tmp_path: Path) -> None:
    counter(tmp_path, 0, 100_000), counter(tmp_path, 1, 900_000)
    (tmp_path / "powercap" / "intel-rapl:0:0").mkdir()  # a part of package 0, which counts it already
    meter = open_meter(tmp_path)
    assert isinstance(meter, RaplCounters)
    meter.start()
    counter(tmp_path, 0, 350_000), counter(tmp_path, 1, 150_000)
    assert meter.joules() == pytest.approx(0.25 + 0.25)


def test_a_battery_that_gives_power_is_a_meter(tmp_path: Path) -> None:
    folder = tmp_path / "power_supply" / "BAT0"
    folder.mkdir(parents=True)
    (folder / "type").write_text("Battery\n")
    (folder / "current_now").write_text("-500000\n")
    (folder / "voltage_now").write_text("4000000\n")
    (folder / "status").write_text("Discharging\n")
    meter = open_meter(tmp_path)
    assert isinstance(meter, Battery)
    start = time.perf_counter()
    meter.start()
    joules = meter.joules()
    assert joules is not None and 0 <= joules <= 2.0 * (time.perf_counter() - start)
    (folder / "status").write_text("Charging\n")
    assert isinstance(open_meter(tmp_path), NoMeter)


def test_a_system_without_meters_says_so(tmp_path: Path) -> None:
    meter = open_meter(tmp_path)
    meter.start()
    assert meter.joules() is None and "neither" in meter.how


def test_inputs_fit_every_port_and_stay_finite() -> None:
    manifest = tiny.make_bundle().manifest
    for graph in manifest.graphs:
        feeds = RandomInputs(manifest).feeds(graph)
        assert feeds.keys() == {port.name for port in graph.inputs if port.role != "state"}
        for port in graph.inputs:
            if port.role != "state":
                assert (feeds[port.name].shape, str(feeds[port.name].dtype)) == (port.shape, port.dtype)
                assert np.isfinite(feeds[port.name]).all()
    labels = RandomInputs(manifest).samples(50).y
    assert set(labels) == {0, 1}


def test_labels_of_samples_are_of_the_type_that_the_graphs_read() -> None:
    manifest = tiny.make_bundle().manifest

    def of_floats(port: Port) -> Port:
        return msgspec.structs.replace(port, dtype="float32") if port.label.endswith(".y") else port

    graphs = tuple(
        msgspec.structs.replace(graph, inputs=tuple(map(of_floats, graph.inputs)))
        for graph in manifest.graphs
    )
    made = RandomInputs(msgspec.structs.replace(manifest, graphs=graphs)).samples(5)
    assert made.labels(np.arange(5)).dtype == np.float32


def test_weights_of_a_round_are_those_that_the_graphs_read_by_unit() -> None:
    manifest = tiny.make_bundle().manifest
    found = RandomInputs(manifest).weights(manifest)
    assert {unit: sorted(held) for unit, held in found.items()} == {
        "stem": ["stem.w"],
        "mid": ["mid.w"],
        "head": ["head.w"],
    }


# -- the size of an answer: a profile that fits one message, thinned where it has to be --------------------


NONCE = "00112233aabbccdd"


@pytest.mark.parametrize("limit", [1 << 17, 8192, 4096, 2048])
def test_an_answer_fits_its_message_and_keeps_the_figures_of_each_graph(limit: int) -> None:
    profile = example_profile(points=profiles.MOMENTS, ops=profiles.OPS)

    answer = answer_with(NONCE, profile, limit)

    assert len(messages.encode(answer)) <= limit
    found = profiles.decode(answer.profile)
    assert [graph.run for graph in found.graphs] == [graph.run for graph in profile.graphs]
    assert found.peak_bytes == profile.peak_bytes
    assert (found == profile) == (limit > 4096)


def test_thinning_the_points_of_time_loses_no_peak() -> None:
    profile = example_profile(points=profiles.MOMENTS)

    found = profiles.decode(answer_with(NONCE, profile, 4096).profile).timeline.moments

    assert 0 < len(found) < profiles.MOMENTS
    assert max(moment.rss_bytes for moment in found) == max(
        moment.rss_bytes for moment in profile.timeline.moments
    )


def test_a_profile_that_fits_no_message_is_declined() -> None:
    answer = answer_with(NONCE, example_profile(), 256)

    assert (answer.state, answer.reason) == ("declined", "too-large")
