"""A federation that somebody starts by hand: a user's own algorithm, a server that signs, devices without torch."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file

from edgefl.config import load
from edgefl.data.dataset import write_client
from edgefl.data.datasets import digits
from edgefl.errors import ConfigError
from edgefl.setup.data import open_data
from edgefl.wire.bundle.archive import Signer
from edgefl_server.compose import compose
from edgefl_server.profiling.reports import DeviceReport, FleetReport
from tests import needs
from tests.conftest import BrokerProcess
from tests.e2e.bare import REPOSITORY, bare_environment
from tests.e2e.inside import PATIENCE_S, edgefl, lines
from tests.e2e.runs import TINY
from tests.e2e.shared import made_once
from tests.support.commands import run_command

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
ROUNDS = 2
_ALONE = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
TRUSTING = {"trusting-onnx": "onnx", "trusting-executorch": "executorch"}
CONFIG = (
    TINY.replace('name = "e2e"', f'name = "by-hand"\nrounds = {ROUNDS}').replace(
        "[algorithm]", '[algorithm]\nname = "feddyn.py:feddyn"\nalpha = 0.05'
    )
    + "offline_grace_s = 0\n"
    + """
[export]
formats = ["onnx", "executorch"]
[round]
min_devices = 3
[tiers.strong]
cut = 0
"""
)


@dataclass(frozen=True)
class ByHand:
    """What was said in a federation of two devices that know the server's key and one that knows another."""

    folder: Path
    profiles: dict[str, DeviceReport]
    served: list[dict[str, Any]]
    said: dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="session")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment that has what a device declares, and nothing else."""
    return bare_environment(tmp_path_factory.mktemp("bare") / "environment")


@pytest.fixture(scope="session")
def by_hand(tmp_path_factory: pytest.TempPathFactory, python: Path, mosquitto: BrokerProcess) -> ByHand:
    """Devices that wait are profiled first, and then trained by the server with the same bundles."""
    needs.require("executorch")
    with made_once(tmp_path_factory, "by-hand") as folder:
        if not (folder / "said.json").exists():
            _run(folder, python, str(mosquitto.address))
        said = json.loads((folder / "said.json").read_text())
        report = msgspec.json.decode((folder / "profiles.json").read_text(), type=FleetReport)
    return ByHand(folder, {row.device: row for row in report.devices}, said.pop("server"), said)


def _run(folder: Path, python: Path, broker: str) -> None:
    data = digits()
    write_client(folder / "data.npz", data.train_x[:40], data.train_y[:40])
    shutil.copy(REPOSITORY / "examples" / "feddyn.py", folder)
    config = folder / "federation.toml"
    config.write_text(CONFIG.replace("feddyn.py:", f"{folder / 'feddyn.py'}:"))
    key, other = Signer(folder / "server.key"), Signer(folder / "other.key")
    federation = load(config)
    compose(federation, open_data(federation), folder / "out")  # the server takes these bundles
    with ExitStack() as stack:

        def start(name: str, engine: str, known: Signer) -> subprocess.Popen[str]:
            command = [str(python), "-m", "edgefl", "device", "--id", name, "--federation", "by-hand"]
            command += [
                "--broker",
                broker,
                "--engine",
                engine,
                "--server-key",
                known.public_key,
                "--until-done",
            ]
            command += ["--data", str(folder / "data.npz"), "--store", str(folder / name), "--json"]
            process = subprocess.Popen(command, cwd=folder, env=_ALONE, stdout=subprocess.PIPE, text=True)
            stack.callback(process.kill)
            return process

        devices = {name: start(name, engine, key) for name, engine in TRUSTING.items()}
        devices["doubting"] = start("doubting", "onnx", other)
        said = {name: [json.loads(_line(device))] for name, device in devices.items()}
        doubting = threading.Thread(target=_kill_once_it_fails, args=(devices["doubting"], said["doubting"]))
        doubting.start()
        sign = ("--sign-key", folder / "server.key")
        profiled = edgefl(
            *(
                "profile",
                "--fleet",
                folder / "out" / "bundles",
                "--broker",
                broker,
                "--federation",
                "by-hand",
            ),
            *("--repeat", "2", "--json", "--html", folder / "fleet.html", *sign),
            *(word for name in devices for word in ("--device", name)),
        )
        served = edgefl(
            *("server", "--config", config, "--broker", broker, "--out", folder / "out", "--json", *sign)
        )
        for name, device in devices.items():
            said[name] += [
                json.loads(line) for line in device.communicate(timeout=PATIENCE_S)[0].splitlines()
            ]
    assert profiled.returncode == 0, profiled.stderr
    assert served.returncode == 0, served.stderr
    (folder / "profiles.json").write_text(profiled.stdout)
    (folder / "said.json").write_text(json.dumps({"server": served.events(), **said}))


def _line(device: subprocess.Popen[str]) -> str:
    assert device.stdout is not None
    return device.stdout.readline()


def _kill_once_it_fails(device: subprocess.Popen[str], said: list[dict[str, Any]]) -> None:
    """A round waits for a device that is online; it need not wait for one that has shown what it does with a round. What it
    is asked before that, it has to have answered."""
    assert device.stdout is not None
    for line in device.stdout:
        said.append(json.loads(line))
        if said[-1]["event"] == "refused" and "rounds/current" in said[-1]["text"]:
            device.kill()
            return


def test_nothing_that_a_device_does_not_declare_is_there(python: Path, tmp_path: Path) -> None:
    names = "torch", "onnx", "sqlalchemy", "amqtt", "sklearn", "edgefl_server", "edgefl_export"
    code = f"import importlib.util as u; print([n for n in {names} if u.find_spec(n)])"
    there = run_command(python, "-c", code, check=True, cwd=tmp_path, env=_ALONE)
    ran = run_command(python, "-m", "edgefl", "run", "--out", tmp_path / "run", cwd=tmp_path, env=_ALONE)

    assert there.stdout.strip() == "[]"
    assert ran.returncode == 1 and "Traceback" not in ran.stderr
    assert "pip install 'edgefl-tiers[server]'" in ran.stderr


def test_devices_without_torch_train_a_users_algorithm(by_hand: ByHand) -> None:
    closed = lines(by_hand.served, "roundclosed")

    assert [(row["outcome"], row["reports"]) for row in closed] == [("closed", len(TRUSTING))] * ROUNDS
    assert all(np.isfinite(row[key]) for row in closed for key in ("loss", "train_loss"))
    for name in TRUSTING:
        assert len(lines(by_hand.said[name], "accepted")) == ROUNDS
        assert not lines(by_hand.said[name], "failed")


def test_what_the_algorithm_keeps_on_the_server_moves_in_each_round(by_hand: ByHand) -> None:
    first, last = (
        load_file(by_hand.folder / "out" / "checkpoints" / f"round-{number:04}.safetensors")
        for number in (1, ROUNDS)
    )
    kept = [name for name in last if name.startswith("h/")]

    assert len(kept) == len(load_file(by_hand.folder / "out" / "model.safetensors"))
    assert all(np.abs(last[name]).max() > 0 for name in kept)
    assert all(not np.array_equal(first[name], last[name]) for name in kept)


def test_a_device_that_knows_another_key_loads_nothing(by_hand: ByHand) -> None:
    said = by_hand.said["doubting"]

    assert "this device knows" in lines(said, "refused")[0]["text"] and not lines(said, "round")


def test_both_engines_measure_and_the_doubting_device_declines(by_hand: ByHand) -> None:
    states = {name: row.state for name, row in by_hand.profiles.items()}
    page = (by_hand.folder / "fleet.html").read_text(encoding="utf-8")

    assert states == {**dict.fromkeys(TRUSTING, "done"), "doubting": "declined"}
    for name, engine in TRUSTING.items():
        profile = by_hand.profiles[name].profile
        assert profile is not None and profile.engine == engine
        assert {graph.name for graph in profile.steps} == {"train"}
        assert profile.step_ms > 0 and profile.timeline.moments
        assert all(graph.run.calls == 2 and graph.load_ms > 0 for graph in profile.graphs)
        assert profile.peak_bytes >= max(graph.peak.rss_bytes for graph in profile.graphs)
        assert f"{name} (strong)" in page


def test_an_unknown_algorithm_is_refused_early(tmp_path: Path) -> None:
    config = tmp_path / "federation.toml"
    config.write_text(CONFIG.replace("feddyn.py:feddyn", "no_such_module:factory") + "count = 1\n")

    ran = edgefl("run", config, "--out", tmp_path / "out", "--json", "--engine", "onnx")

    assert ran.returncode == ConfigError.exit_code
    assert "algorithm.name: there is no module 'no_such_module'" in " ".join(ran.stderr.split())
