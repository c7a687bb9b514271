"""A bundle is measured graph by graph, in processes of its own, without torch."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import numpy as np
import pytest

from edgefl.wire.blobs import describe
from edgefl.wire.bundle import profiles
from edgefl.wire.bundle.archive import BundleArchive, write_bundle
from edgefl.wire.bundle.manifest import decode_manifest, encode_manifest
from edgefl.wire.bundle.profiles import BundleProfile
from edgefl_device.engine.base import LoadedGraph, Outputs
from edgefl_device.engine.executorch import ExecuTorchEngine
from edgefl_device.profile import whole
from edgefl_device.profile.child import ProfilerProcess
from edgefl_device.profile.measure.executorch_trace import trace
from edgefl_device.profile.measure.folder import BundleFolder
from edgefl_device.profile.measure.inputs import RandomInputs
from edgefl_device.profile.whole import ProfileSettings, profile_bundle
from edgefl_device.sandbox.confine import Confinement
from tests.device_runtime import tiny, tiny_pte
from tests.device_runtime.profile import made
from tests.support.errors import BundleError, ConfigError, RoundDeclined, refuses


@pytest.fixture
def measured() -> BundleProfile:
    return made.measured()


def test_every_graph_is_measured_with_its_kind(measured: BundleProfile) -> None:
    assert {graph.name: graph.kind for graph in measured.graphs} == {
        "forward.stem": "forward",
        "forward.mid": "forward",
        "start": "evaluate",
        "train": "step",
        "finish": "finish",
    }
    for graph in measured.graphs:
        assert graph.run.calls == 5
        assert 0 < graph.run.min_ms <= graph.run.median_ms <= graph.run.p90_ms
        assert graph.load_ms > 0
        assert graph.peak.engine_bytes > 0 or graph.kind == "finish", "its outputs are the agent's own"
        assert graph.ops and sum(op.share for op in graph.ops) == pytest.approx(1.0, abs=0.01)


def test_the_profile_names_bundle_engine_and_machine(measured: BundleProfile) -> None:
    bundle = tiny.make_bundle()
    assert measured.bundle == describe(bundle.encoded, 1 << 20).sha256
    assert (measured.engine, measured.tier, measured.batch) == ("onnx", "weak", tiny.BATCH)
    assert measured.engine_version and measured.machine.cores > 0 and measured.machine.memory_bytes > 0
    assert measured.artifact_bytes == sum(len(blob) for blob in bundle.blobs.values())
    assert measured.idle_bytes > 0
    assert measured.peak_bytes >= max(graph.peak.rss_bytes for graph in measured.graphs)


def test_io_of_the_multi_step_forward_is_counted(measured: BundleProfile) -> None:
    first, second = measured.io
    groups = -(-10 // tiny.BATCH)
    row = tiny.WIDTH * 4
    assert [chunk.units for chunk in measured.io] == [("stem",), ("mid",)]
    for chunk in (first, second):
        assert chunk.rows == 10
        assert chunk.fetch_bytes > tiny.WIDTH * row  # the tensor and its header
        assert chunk.read_bytes == groups * tiny.BATCH * row
        assert chunk.write_bytes == 10 * row
        assert chunk.forward_ms > 0 and chunk.load_ms > 0 and chunk.write_ms > 0


def test_memory_over_time_shows_every_chunk_in_order(measured: BundleProfile) -> None:
    spans = measured.timeline.spans
    assert [span.label for span in spans] == [
        "chunk 1 of 2",
        "chunk 2 of 2",
        "start",
        "training (p0)",
        "finish",
    ]
    edges = [edge for span in spans for edge in (span.start_ms, span.end_ms)]
    assert edges == sorted(edges)
    times = [moment.t_ms for moment in measured.timeline.moments]
    assert times == sorted(times) and 0 < len(times) <= profiles.MOMENTS
    assert all(moment.rss_bytes > 1 << 20 for moment in measured.timeline.moments)


@pytest.mark.slow
@pytest.mark.parametrize("delegated", [False, True])
def test_instructions_timed_one_by_one_compute_what_the_engine_computes(delegated: bool) -> None:
    graph, program = tiny_pte.train(delegated=delegated)
    inputs, engine = RandomInputs(tiny.make_bundle().manifest), ExecuTorchEngine(1)
    feeds = inputs.feeds(graph)
    state = {port.name: np.ones(port.shape, port.dtype) for port in graph.inputs_of("state")}
    found: list[Outputs] = []

    def run(loaded: LoadedGraph) -> None:
        found.append(loaded.run(feeds, engine.write_state(state)))

    told = trace(graph, program, 1, run, calls=3)
    run(engine.load(graph, program))

    assert told.instructions and len(told.nodes) > 1
    assert all(node.ms > 0 for node in told.nodes)
    for name, array in found[-1].state.items():
        for outputs in found[:-1]:
            np.testing.assert_array_equal(outputs.state[name], array)


def test_a_measured_process_never_imports_torch_or_onnx() -> None:
    code = (
        "import sys, edgefl_device.profile.__main__, edgefl_device.profile.whole; "
        "print([name for name in ('torch', 'onnx', 'onnxruntime') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True
    )
    assert done.stdout.strip() == "[]"


def test_a_damaged_graph_is_one_clear_error() -> None:
    bundle = tiny.make_bundle(prefix=())
    manifest = bundle.manifest
    broken = b"no model"
    ref = describe(broken, 256)
    graphs = tuple(
        msgspec.structs.replace(graph, blob=ref) if graph.name == "start" else graph
        for graph in manifest.graphs
    )
    damaged = BundleArchive(
        msgspec.structs.replace(manifest, graphs=graphs), {**bundle.blobs, ref.sha256: broken}
    )
    with pytest.raises(BundleError, match=r"round was not measured.*cannot load graph 'start'"):
        profile_bundle(damaged, ProfileSettings(repeat=1))


def test_an_engine_of_another_format_is_refused_before_anything_runs() -> None:
    with refuses(BundleError, format="onnx", engine="executorch"):
        profile_bundle(tiny.make_bundle(), ProfileSettings(engine="executorch"))


@pytest.mark.parametrize("wrong", [{"threads": 0}, {"repeat": 0}, {"samples": -1}])
def test_settings_that_cannot_be_used_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="at least"):
        profile_bundle(tiny.make_bundle(), ProfileSettings(**wrong))  # type: ignore[arg-type]


def test_a_process_that_takes_too_long_is_ended() -> None:
    with refuses(BundleError, part="round", limit_s=0.01):
        profile_bundle(tiny.make_bundle(), ProfileSettings(limit_s=0.01))


CONFINED = Confinement(file_bytes=1 << 30)


@pytest.mark.slow
def test_confined_processes_measure_the_same(tmp_path: Path) -> None:
    path = tmp_path / "bundle.efl"
    write_bundle(tiny.make_bundle(), path)
    child = ProfilerProcess(engine="onnx", threads=1, confinement=CONFINED)
    found, free = child.measure(path, 2, threading.Event(), math.inf), made.measured()
    assert [graph.name for graph in found.graphs] == [graph.name for graph in free.graphs]
    assert found.bundle == free.bundle and found.peak_bytes > 0


def test_a_confined_process_reads_no_file_but_its_bundles(tmp_path: Path) -> None:
    """As a graph would that names one; here the bundle itself lies elsewhere."""
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    inside.mkdir()
    outside.mkdir()
    for path in BundleFolder.unpacked(tiny.make_bundle(), outside).path.iterdir():
        (inside / path.name).symlink_to(path)
    settings = ProfileSettings(repeat=1)
    assert whole._run(BundleFolder(inside), "graph:start", "onnx", settings).graph
    with pytest.raises(BundleError, match="PermissionError"):
        whole._run(
            BundleFolder(inside), "graph:start", "onnx", dataclasses.replace(settings, confinement=CONFINED)
        )


def test_no_variable_of_the_agent_reaches_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def telling(*_: object) -> list[str]:
        return [sys.executable, "-c", "import os, sys; sys.exit(str('EDGEFL_TOKEN' in os.environ))"]

    monkeypatch.setenv("EDGEFL_TOKEN", "secret")
    monkeypatch.setattr("edgefl_device.profile.child.command", telling)
    with pytest.raises(RoundDeclined, match="False"):
        ProfilerProcess(engine="onnx", threads=1).measure(
            tmp_path / "bundle.efl", 1, threading.Event(), math.inf
        )


@pytest.mark.parametrize("written", [b"\xc1", bytes(100)])
def test_output_is_read_as_untrusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: bytes) -> None:
    (out := tmp_path / "part").write_bytes(written)
    monkeypatch.setattr(whole, "_MOST_BYTES", 50)
    with pytest.raises(BundleError, match=r"cannot be read|more than 50 bytes"):
        whole._read(out, "round")


def test_a_profile_travels_in_a_few_kilobytes(measured: BundleProfile) -> None:
    data = profiles.encode(measured)
    assert profiles.decode(data) == measured
    assert len(data) < 16_000


def test_sources_of_a_manifest_come_back_as_its_last_blobs() -> None:
    manifest = tiny.make_bundle().manifest
    ref = describe(b"x", 16)
    with_sources = msgspec.structs.replace(manifest, sources=ref)
    assert decode_manifest(encode_manifest(with_sources)).sources == ref
    assert with_sources.blobs[-1] == ref
