"""What a device costs before it trains: the rows of `python -m benchmarks footprint`, and how its packages are counted."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from benchmarks import footprint
from benchmarks.footprint import IdleClient, device_command, idle_agents, training_peak
from edgefl.errors import EdgeflError

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def idle() -> IdleClient:
    (found,) = idle_agents(device_command(sys.executable), "onnx", 1)
    return found


@pytest.mark.slow
def test_the_memory_of_a_connected_device_is_measured(idle: IdleClient) -> None:
    assert 0 < idle.idle_anonymous_bytes < idle.idle_pss_bytes < idle.idle_rss_bytes
    assert idle.ready_s > 0


def test_the_waiting_process_holds_none_of_what_read_its_options() -> None:
    script = (
        "import sys\nfrom edgefl.cli import isolated\nfrom edgefl.cli.device import process\nprocess.load()\n"
        "print(sorted({'typer', 'rich', 'pydantic', 'torch', 'http'} & set(sys.modules)))"
    )
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=300
    )

    assert found.stdout.strip() == "[]"


def test_the_counted_packages_are_those_that_an_installation_asks_for() -> None:
    asked = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]

    assert {Requirement(text).name for text in asked} == set(footprint.DEVICE)


def test_a_devices_packages_are_counted_with_what_they_require() -> None:
    found = footprint.installed(sys.executable, footprint.DEVICE)

    assert {"numpy", "onnxruntime", "flatbuffers", "protobuf", "pygments"} <= found.keys()
    assert not {"torch", "onnx", "sympy", "zstandard"} & found.keys()
    assert sum(int(str(size["bytes"])) for size in found.values()) > 50e6


def test_what_is_left_out_is_not_counted_and_a_marked_name_stands_alone() -> None:
    assert "onnxruntime" not in footprint.installed(sys.executable, ["onnxruntime", "numpy", "-onnxruntime"])
    assert footprint.installed(sys.executable, ["onnxruntime!"]).keys() == {"onnxruntime"}


def test_a_package_that_is_not_installed_is_named() -> None:
    with pytest.raises(EdgeflError, match=r"no-such-package.*install what is missing"):
        footprint.installed(sys.executable, ["no-such-package"])


def test_a_row_without_its_packages_has_the_other_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = IdleClient(0.5, 60_000_000, 30_000_000, 35_000_000)
    monkeypatch.setattr(footprint, "idle_flower_clients", lambda *_: iter([measured]))

    row = footprint.python_row(footprint.ClientKind("other", ("no-such-package",)), sys.executable, 1)

    assert (row.idle_rss_bytes, row.ready_s, row.installed_bytes) == (60_000_000, 0.5, None)
    assert "no-such-package" in row.error


def test_our_own_packages_are_small_beside_what_they_need() -> None:
    assert 100_000 < footprint.own_bytes() < 12_000_000  # with the page for browsers, if that is built


# -- the C++ agent ---------------------------------------------------------------------------------------------


@pytest.mark.needs("strip")
def test_a_binary_counts_with_its_libraries_without_the_systems() -> None:
    python = Path(sys.executable).resolve()

    found = footprint.sizes(python)

    assert 0 < found[python.name] <= python.stat().st_size
    assert not {"libc.so.6", "libm.so.6"} & found.keys()
    assert all(count > 0 for count in found.values())


def test_a_binary_that_is_none_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "agent").write_text("no algorithm")

    with pytest.raises(EdgeflError, match="strip"):
        footprint.sizes(tmp_path / "agent")


@pytest.mark.slow
def test_the_peak_of_an_agent_that_trains_is_above_that_of_one_that_waits(idle: IdleClient) -> None:
    assert training_peak(device_command(sys.executable), "onnx") > idle.idle_rss_bytes


def test_an_agent_that_ends_at_once_is_an_error_with_its_last_words() -> None:
    with pytest.raises(EdgeflError, match="the round in which the agent trains did not end"):
        training_peak([sys.executable, "-c", "raise SystemExit('no such sensor')"], "onnx")
