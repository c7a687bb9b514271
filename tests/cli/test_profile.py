"""``edgefl profile``."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
from typer.testing import Result

from edgefl.cli import app
from edgefl.errors import BundleError, ConfigError, DataError
from edgefl.wire.bundle.archive import Bundle, read_bundle, write_bundle
from edgefl.wire.bundle.profiles import BundleProfile
from edgefl_device.profile import whole
from edgefl_device.profile.measure.folder import BundleFolder
from edgefl_device.profile.measure.parts import GRAPH, Part
from edgefl_device.profile.whole import ProfileSettings
from tests.cli.runner import runner
from tests.device_runtime import tiny
from tests.device_runtime.profile import made
from tests.device_runtime.profile.processes import ENDLESS, measuring, runs
from tests.wire.mqtt.events import PATIENCE_S, wait_until

INTERRUPTIBLE = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has what runs in its background ignore it
from edgefl.cli import main
main()
"""
AGENT = """
import math, sys
from pathlib import Path
from edgefl_device.profile.child import Child
Child(engine="onnx", threads=1).measure(Path(sys.argv[1]), int(sys.argv[2]), lambda: False, math.inf)
"""


@pytest.fixture
def strong(tmp_path: Path) -> Path:
    path = tmp_path / "strong.efl"
    write_bundle(tiny.make_bundle(prefix=()), path)
    return path


@dataclass(frozen=True)
class Asked:
    """A command that measured, and what it left."""

    done: Result
    page: str

    @property
    def profiles(self) -> list[BundleProfile]:
        return msgspec.json.decode(self.done.stdout, type=list[BundleProfile])


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Asked:
    """A bundle's profile for people and machines, with a run beside it."""
    folder = tmp_path_factory.mktemp("measured")
    bundle, html = folder / "strong.efl", folder / "out" / "report.html"
    write_bundle(tiny.make_bundle(prefix=()), bundle)
    run = made.journal(folder / "run", [("strong", 1, '{"correct": 3}', "")])
    options = ["--repeat", "2", "--json", "--html", str(html), "--run", str(run)]
    done = runner().invoke(app, ["profile", str(bundle), *options])
    assert done.exit_code == 0, done.output
    return Asked(done, html.read_text())


@pytest.fixture
def measured_before(measured: Asked, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """The command finds a profile that was measured once; these are the tiers and engines that it asks for."""
    asked: list[tuple[str, str]] = []

    def profile(bundle: Bundle, settings: ProfileSettings, _watch: object = None) -> BundleProfile:
        listed, engine = bundle.manifest, settings.engine or bundle.manifest.graphs[0].format
        asked.append((listed.tier, engine))
        return msgspec.structs.replace(
            measured.profiles[0], tier=listed.tier, exchange=listed.exchange, engine=engine
        )

    monkeypatch.setattr(whole, "profile_bundle", profile)
    return asked


def test_json_page_and_run_in_one_call(measured: Asked) -> None:
    assert measured.done.exit_code == 0, measured.done.output
    (profile,) = measured.profiles
    assert [graph.name for graph in profile.graphs] == ["start", "train", "finish"]
    assert all(graph.run.calls == 2 for graph in profile.graphs)
    assert "Memory against accuracy" in measured.page


@pytest.mark.parametrize(
    ("options", "told"), [(["--run", "."], "--html"), (["--run", "gone", "--html", "x.html"], "no folder")]
)
def test_a_run_without_a_page_or_a_folder_is_refused_before_anything_is_measured(
    strong: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], told: str
) -> None:
    monkeypatch.chdir(tmp_path)

    done = runner().invoke(app, ["profile", str(strong), "--repeat", "100000000", *options])

    assert isinstance(done.exception, ConfigError) and told in done.exception.message


@pytest.mark.slow
@pytest.mark.usefixtures("measured_before")
def test_tables_name_every_graph(strong: Path) -> None:
    done = runner().invoke(app, ["profile", str(strong), "--repeat", "1"], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    for words in ("strong: graphs", "train", "finish", "costliest ops", "energy"):
        assert words in done.stdout


@pytest.mark.usefixtures("measured_before")
def test_no_word_of_a_heading_is_broken_in_a_terminal_of_eighty_columns(strong: Path) -> None:
    done = runner().invoke(app, ["profile", str(strong), "--repeat", "1"], env={"COLUMNS": "80"})
    assert done.exit_code == 0, done.output
    for word in ("backward", "planned", "engine", "median", "energy"):
        assert f" {word} " in done.stdout


def test_another_batch_than_the_bundles_is_refused_with_the_remedy(strong: Path) -> None:
    done = runner().invoke(app, ["profile", str(strong), "--batch", "64"])
    assert isinstance(done.exception, ConfigError)
    assert f"batch {tiny.BATCH}" in done.exception.message and "--batch 64" in done.exception.message


def test_an_engine_that_does_not_run_the_bundle_is_refused(strong: Path) -> None:
    done = runner().invoke(app, ["profile", str(strong), "--engine", "executorch"])
    assert isinstance(done.exception, ConfigError)
    assert "in format executorch" in done.exception.message and "--format" in done.exception.message


def test_a_run_that_tells_no_accuracy_is_refused_before_anything_is_measured(
    strong: Path, tmp_path: Path
) -> None:
    run = made.journal(tmp_path / "run", [("strong", 1, "{}", "")])
    options = ["--repeat", "100000000", "--run", str(run), "--html", str(tmp_path / "x.html")]

    done = runner().invoke(app, ["profile", str(strong), *options])

    assert isinstance(done.exception, DataError), done.exception


def test_a_run_of_another_model_is_refused_before_anything_is_measured(strong: Path, tmp_path: Path) -> None:
    run = made.journal(tmp_path / "run", [("strong", 1, '{"correct": 3}', "")])
    bundle = read_bundle(strong)
    other = msgspec.structs.replace(bundle.manifest, model="resnet20")
    write_bundle(Bundle(other, bundle.blobs), strong)
    options = ["--repeat", "100000000", "--run", str(run), "--html", str(tmp_path / "x.html")]

    done = runner().invoke(app, ["profile", str(strong), *options])

    assert isinstance(done.exception, ConfigError), done.exception
    assert (
        f"trained {bundle.manifest.model}" in done.exception.message and "resnet20" in done.exception.message
    )


@pytest.mark.slow
def test_a_federation_file_is_profiled_in_the_formats_that_it_names(tmp_path: Path) -> None:
    text = '[model]\nname = "mlp"\n[data]\nname = "digits"\n[export]\nformats = ["onnx", "executorch"]\n[tiers.strong]\n'
    (tmp_path / "federation.toml").write_text(text)
    command = ["profile", str(tmp_path / "federation.toml"), "--repeat", "1", "--json"]

    both = msgspec.json.decode(runner().invoke(app, command).stdout, type=list[BundleProfile])
    one = msgspec.json.decode(
        runner().invoke(app, [*command, "--engine", "executorch"]).stdout, type=list[BundleProfile]
    )

    assert [(each.tier, each.engine) for each in both] == [("strong", "onnx"), ("strong", "executorch")]
    assert [each.engine for each in one] == ["executorch"]


@pytest.mark.slow
@pytest.mark.usefixtures("measured_before")
def test_every_exchange_of_an_algorithm_is_profiled(tmp_path: Path) -> None:
    text = '[model]\nname = "mlp"\n[data]\nname = "digits"\n[algorithm]\nname = "stem"\n[tiers.strong]\n'
    (tmp_path / "federation.toml").write_text(text)

    done = runner().invoke(app, ["profile", str(tmp_path / "federation.toml"), "--repeat", "1", "--json"])

    found = msgspec.json.decode(done.stdout, type=list[BundleProfile])
    assert len(found) > 1 and len({each.exchange for each in found}) == len(found), done.output


def _command(bundle: Path, folder: Path) -> subprocess.Popen[bytes]:
    """A command that goes on for long, its temporary files below ``folder / "scratch"``."""
    (scratch := folder / "scratch").mkdir()
    return subprocess.Popen(
        [sys.executable, "-c", INTERRUPTIBLE, "profile", str(bundle), "--repeat", ENDLESS],
        env=os.environ | {"TMPDIR": str(scratch)},
        stderr=subprocess.DEVNULL,
    )


@pytest.mark.slow
def test_a_process_that_measures_ends_with_a_killed_command(strong: Path, tmp_path: Path) -> None:
    running = _command(strong, tmp_path)
    with measuring(running) as below:
        assert len(below) == 1
        running.kill()
        running.wait(PATIENCE_S)

        wait_until(lambda: not any(map(runs, below)), "the process that measured ended")


def test_the_processes_that_measure_for_an_agent_end_with_a_killed_agent(strong: Path) -> None:
    agent = subprocess.Popen([sys.executable, "-c", AGENT, str(strong), ENDLESS])
    with measuring(agent) as below:
        assert len(below) == 2
        agent.kill()
        agent.wait(PATIENCE_S)

        wait_until(lambda: not any(map(runs, below)), "the processes that measured ended")


def test_a_part_is_measured_by_hand_without_a_standard_input(strong: Path, tmp_path: Path) -> None:
    BundleFolder.unpacked(read_bundle(strong), tmp_path)
    command = [sys.executable, "-m", "edgefl_device.profile", str(tmp_path), GRAPH + "train"]
    command += ["--engine", "onnx", "--repeat", "1", "--out", str(tmp_path / "part")]

    done = subprocess.run(command, stdin=subprocess.DEVNULL, timeout=PATIENCE_S, check=False)

    assert done.returncode == 0
    part = msgspec.msgpack.decode((tmp_path / "part").read_bytes(), type=Part)
    assert part.graph is not None and part.graph.name == "train"


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_profile_that_is_ended_leaves_no_process_and_no_folder(
    strong: Path, tmp_path: Path, number: signal.Signals
) -> None:
    running = _command(strong, tmp_path)
    with measuring(running) as below:
        running.send_signal(number)

        assert running.wait(PATIENCE_S) == 130
        assert list((tmp_path / "scratch").iterdir()) == []
        wait_until(lambda: not any(map(runs, below)), "the process that measured ended")


@pytest.mark.parametrize("option", ["--device=phone-1", "--sign-key=key", "--timeout=5"])
def test_an_option_of_a_fleet_without_one_is_refused(strong: Path, option: str) -> None:
    done = runner().invoke(app, ["profile", str(strong), option])
    assert isinstance(done.exception, ConfigError)
    assert option.partition("=")[0] in done.exception.message and "--fleet" in done.exception.message


@pytest.mark.usefixtures("measured_before")
def test_a_folder_stands_for_the_bundles_in_it(strong: Path) -> None:
    done = runner().invoke(app, ["profile", str(strong.parent), "--repeat", "1", "--json"])
    assert done.exit_code == 0, done.output
    assert len(msgspec.json.decode(done.stdout)) == 1


def test_a_folder_without_bundles_is_refused(tmp_path: Path) -> None:
    done = runner().invoke(app, ["profile", str(tmp_path)])
    assert isinstance(done.exception, ConfigError) and "edgefl export" in done.exception.message


@pytest.mark.parametrize("target", ["missing.efl", "nowhere/at-all"])
def test_what_is_no_bundle_is_one_clear_error(target: str) -> None:
    done = runner().invoke(app, ["profile", target])
    assert isinstance(done.exception, BundleError), done.exception


def test_a_tier_that_no_bundle_has_is_refused(strong: Path) -> None:
    done = runner().invoke(app, ["profile", str(strong), "--tier", "weak"])
    assert isinstance(done.exception, ConfigError) and "weak" in done.exception.message


@pytest.mark.slow
def test_a_model_is_exported_first_with_the_wanted_batch() -> None:
    done = runner().invoke(
        app, ["profile", "mlp", "--batch", "3", "--tier", "strong", "--repeat", "1", "--json"]
    )
    assert done.exit_code == 0, done.output
    (found,) = msgspec.json.decode(done.stdout, type=list[BundleProfile])
    (step,) = found.steps
    assert (found.model, found.batch) == ("mlp", 3)
    assert step.macs > 0 and step.split is not None and step.split.how == "measured"
    assert step.split.backward_ms > 0
    assert any(op.module == "dense1.dense" for op in step.ops)
