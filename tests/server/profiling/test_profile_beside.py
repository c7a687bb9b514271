"""`edgefl profile --device-command`: any agent's numbers beside this machine's own, and recorded ones beside both."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import msgspec
import pytest

from edgefl.errors import ConfigError, ParticipationError
from edgefl.wire.bundle.archive import write_bundle
from edgefl_server.profiling.reports import FleetReport, read_recorded
from tests.device_runtime import tiny, tiny_pte
from tests.e2e.inside import Ran, edgefl
from tests.e2e.runs import EDGEFL

pytestmark = pytest.mark.e2e
AGENT = " ".join([*EDGEFL, "device"])
DEAF = "import sys, time; print('a phone without a network', flush=True); time.sleep(600)"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bundle") / "strong.efl"
    write_bundle(tiny.make_bundle(prefix=()), path)
    return path


def profile(*words: str | Path) -> Ran:
    return edgefl("profile", *words, "--repeat", "1", "--json")


@pytest.fixture(scope="module")
def recorded(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[FleetReport, Path]:
    """The Python agent's profile, taken over a broker, and the file that it was recorded in."""
    file = tmp_path_factory.mktemp("recorded") / "phones" / "pixel.json"

    done = profile(bundle, "--device-command", AGENT, "--device", "pixel-7", "--record", file)

    assert done.returncode == 0, done.stderr
    return msgspec.json.decode(done.stdout, type=FleetReport), file


@pytest.mark.slow
def test_the_agent_of_the_command_stands_beside_this_machine(recorded: tuple[FleetReport, Path]) -> None:
    report, _ = recorded

    assert [(row.device, row.state) for row in report.devices] == [
        ("this-machine", "done"),
        ("pixel-7", "done"),
    ]
    here, there = (row.profile for row in report.devices)
    assert here is not None
    assert there is not None
    assert [graph.name for graph in here.graphs] == [graph.name for graph in there.graphs]
    assert report.devices[1].agent.startswith("edgefl")


def test_a_recorded_profile_is_shown_unmeasured(recorded: tuple[FleetReport, Path], tmp_path: Path) -> None:
    report, file = recorded

    done = edgefl("profile", "--import", file, "--json", "--html", tmp_path / "page.html")

    assert done.returncode == 0, done.stderr
    assert msgspec.json.decode(done.stdout, type=FleetReport).devices == report.devices
    assert "pixel-7 (strong)" in (tmp_path / "page.html").read_text()


@pytest.mark.slow
def test_recorded_profiles_follow_measured_ones(recorded: tuple[FleetReport, Path], bundle: Path) -> None:
    done = profile(bundle, "--import", recorded[1])

    found = msgspec.json.decode(done.stdout, type=FleetReport)
    assert [row.device for row in found.devices] == ["this-machine", "this-machine", "pixel-7"]


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("false", "ended with exit code 1 before it answered, and it wrote nothing"),
        (
            f"{sys.executable} -c \"raise SystemExit('no such sensor')\"",
            "its last words were: no such sensor",
        ),
        pytest.param(f"{AGENT} --threads none", "ended with exit code 2", marks=pytest.mark.slow),
    ],
)
def test_a_command_that_ends_is_told_of_with_its_last_words(command: str, told: str, bundle: Path) -> None:
    done = profile(bundle, "--device-command", command)

    assert done.returncode == ParticipationError.exit_code
    assert told in done.stderr


@pytest.mark.slow
def test_a_command_that_never_answers_is_given_up(bundle: Path, tmp_path: Path) -> None:
    script = tmp_path / "deaf.py"
    script.write_text(DEAF)

    done = profile(bundle, "--device-command", f"{sys.executable} {script}", "--timeout", "2")

    assert done.returncode == ParticipationError.exit_code
    assert "no agent 'agent' came to the broker" in done.stderr
    assert "a phone without a network" in done.stderr


def test_a_command_that_is_not_there_is_refused(bundle: Path) -> None:
    done = profile(bundle, "--device-command", "no-such-agent --fast")

    assert done.returncode == ConfigError.exit_code
    assert "cannot be run (No such file or directory: 'no-such-agent')" in done.stderr


@pytest.mark.slow
def test_an_algorithm_for_executorch_is_signed_for_the_agent(tmp_path: Path) -> None:
    write_bundle(tiny_pte.make_bundle(()), tmp_path / "strong.efl")

    done = profile(tmp_path / "strong.efl", "--device-command", AGENT)

    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "holds no recorded profiles"),
        (b"\xff", "holds no recorded"),
        (b'{"v":2,"devices":[]}', "version 2"),
    ],
)
def test_a_file_that_holds_no_profiles_is_refused(content: bytes, told: str, tmp_path: Path) -> None:
    (tmp_path / "other.json").write_bytes(content)

    done = edgefl("profile", "--import", tmp_path / "other.json")

    assert done.returncode == ConfigError.exit_code
    assert told in done.stderr


def test_a_recorded_number_too_large_is_refused(recorded: tuple[FleetReport, Path], tmp_path: Path) -> None:
    raw = json.loads(recorded[1].read_text())
    raw["devices"][0]["profile"]["idle_bytes"] = 10**30
    (tmp_path / "huge.json").write_text(json.dumps(raw))

    with pytest.raises(ConfigError, match="holds no recorded profiles"):
        read_recorded(tmp_path / "huge.json")


def test_nothing_to_profile_is_refused() -> None:
    done = edgefl("profile")

    assert done.returncode == ConfigError.exit_code
    assert "name a bundle" in done.stderr
