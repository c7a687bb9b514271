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
from edgefl.errors import BundleError, ConfigError, DataError, EdgeflError
from edgefl.wire.bundle.archive import BundleArchive, read_bundle, write_bundle
from edgefl.wire.bundle.profiles import BundleProfile
from edgefl_device.profile import whole
from edgefl_device.profile.measure.folder import BundleFolder
from edgefl_device.profile.measure.round import GRAPH, ProcessResult
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
import math, sys, threading
from pathlib import Path
from edgefl_device.profile.child import ProfilerProcess
ProfilerProcess(engine="onnx", threads=1).measure(Path(sys.argv[1]), int(sys.argv[2]), threading.Event(), math.inf)
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

    def profile(bundle: BundleArchive, settings: ProfileSettings, _watch: object = None) -> BundleProfile:
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
    ("arguments", "error", "words"),
    [
        ("strong.efl --run .", ConfigError, "--html"),
        ("strong.efl --run gone --html x.html", ConfigError, "no folder"),
        ("strong.efl --batch 64", ConfigError, f"batch {tiny.BATCH} --batch 64"),
        ("strong.efl --engine executorch", ConfigError, "executorch --format"),
        ("strong.efl --tier weak", ConfigError, "weak"),
        ("strong.efl --device=phone-1", ConfigError, "--device --fleet"),
        ("strong.efl --sign-key=key", ConfigError, "--sign-key --fleet"),
        ("strong.efl --timeout=5", ConfigError, "--timeout --fleet"),
        ("empty", ConfigError, "edgefl export"),
        ("missing.efl", BundleError, "missing.efl"),
        ("nowhere/at-all", BundleError, "nowhere/at-all"),
    ],
)
def test_mistakes_are_refused_before_anything_is_measured(
    strong: Path, monkeypatch: pytest.MonkeyPatch, arguments: str, error: type[EdgeflError], words: str
) -> None:
    monkeypatch.chdir(strong.parent)
    Path("empty").mkdir()

    done = runner().invoke(app, ["profile", *arguments.split(), "--repeat", ENDLESS])

    assert isinstance(done.exception, error), done.output
    assert all(word in done.exception.message for word in words.split())


@pytest.mark.usefixtures("measured_before")
@pytest.mark.parametrize(
    ("columns", "words"),
    [
        pytest.param(
            "200", ["strong: graphs", "train", "finish", "costliest ops", "energy"], marks=pytest.mark.slow
        ),
        ("80", [" backward ", " planned ", " engine ", " median ", " energy "]),
    ],
)
def test_tables_name_every_graph_and_break_no_word(strong: Path, columns: str, words: list[str]) -> None:
    done = runner().invoke(app, ["profile", str(strong), "--repeat", "1"], env={"COLUMNS": columns})

    assert done.exit_code == 0, done.output
    assert [word for word in words if word not in done.stdout] == []


def test_a_run_without_accuracy_is_refused(strong: Path, tmp_path: Path) -> None:
    run = made.journal(tmp_path / "run", [("strong", 1, "{}", "")])
    options = ["--repeat", "100000000", "--run", str(run), "--html", str(tmp_path / "x.html")]

    done = runner().invoke(app, ["profile", str(strong), *options])

    assert isinstance(done.exception, DataError), done.exception


def test_a_run_of_another_model_is_refused_before_anything_is_measured(strong: Path, tmp_path: Path) -> None:
    run = made.journal(tmp_path / "run", [("strong", 1, '{"correct": 3}', "")])
    bundle = read_bundle(strong)
    other = msgspec.structs.replace(bundle.manifest, model="resnet20")
    write_bundle(BundleArchive(other, bundle.blobs), strong)
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
    part = msgspec.msgpack.decode((tmp_path / "part").read_bytes(), type=ProcessResult)
    assert part.graph is not None and part.graph.name == "train"


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_an_ended_profile_leaves_nothing(strong: Path, tmp_path: Path, number: signal.Signals) -> None:
    running = _command(strong, tmp_path)
    with measuring(running) as below:
        running.send_signal(number)

        assert running.wait(PATIENCE_S) == 130
        assert list((tmp_path / "scratch").iterdir()) == []
        wait_until(lambda: not any(map(runs, below)), "the process that measured ended")


@pytest.mark.usefixtures("measured_before")
def test_a_folder_stands_for_the_bundles_in_it(strong: Path) -> None:
    done = runner().invoke(app, ["profile", str(strong.parent), "--repeat", "1", "--json"])
    assert done.exit_code == 0, done.output
    assert len(msgspec.json.decode(done.stdout)) == 1


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
