"""org.edgefl.Agent on OpenJDK: an agent in a JVM takes part in rounds with a Python device, over the real broker."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from edgefl.data.dataset import write_client
from edgefl.data.datasets import digits
from tests import needs
from tests.agents.cpp.build import build
from tests.agents.cpp.federations import PYTHON, Device, Trained, train
from tests.agents.java.build import Classes, compiled
from tests.conftest import BrokerProcess
from tests.e2e.runs import EDGEFL, PATIENCE_S, TINY
from tests.support.commands import run_command

pytestmark = pytest.mark.e2e
ENGINE, ROWS, ROUNDS = "executorch", 60, 2
CONFIG = (
    TINY.replace('name = "e2e"', f'name = "NAME"\nrounds = {ROUNDS}\nseed = 7')
    + '\n[export]\nformats = ["executorch"]\n[round]\nmin_devices = 2\n[tiers.strong]\n'
)


@pytest.fixture(scope="module")
def classes(tmp_path_factory: pytest.TempPathFactory) -> Classes:
    needs.require("javac")
    return compiled(build(), tmp_path_factory.mktemp("java"), [Path(__file__).with_name("Device.java")])


@dataclass
class World:
    """Where devices of a test find their data, and the server's runs are.

    Each test has a ``federation`` of its own: the broker retains what the server of the test before said, and devices
    would trust its key.
    """

    folder: Path
    broker: str
    federation: str
    classes: Classes

    def jvm(self, run: str, name: str, mode: str) -> Device:
        words = [mode, name, self.broker, self.federation, self.folder / run / name, ENGINE]
        data = [self.folder / f"{name}.x", self.folder / f"{name}.y"]
        return Device(self.classes.command("Device", *words, *data), self.folder / run / name)

    def python(self, run: str, name: str) -> Device:
        folder = self.folder / run / name
        options = [
            "--id",
            name,
            "--federation",
            self.federation,
            "--broker",
            self.broker,
            "--engine",
            ENGINE,
            "--json",
        ]
        options += ["--data", str(self.folder / f"{name}.npz"), "--store", str(folder), "--until-done"]
        return Device([*PYTHON, *options], folder)

    def train(self, run: str, devices: dict[str, Device]) -> Trained:
        bundles = self.folder / "first" / "out" / "bundles"
        ready = bundles if bundles.is_dir() else None
        return train(self.folder / run, self.folder / "federation.toml", self.broker, devices, ready)


@pytest.fixture
def world(tmp_path: Path, mosquitto: BrokerProcess, classes: Classes, federation: str) -> World:
    data = digits()
    (tmp_path / "federation.toml").write_text(CONFIG.replace("NAME", federation))
    for place, name in enumerate(("one", "two")):
        rows = slice(place * ROWS, (place + 1) * ROWS)
        x, y = data.train_x[rows], data.train_y[rows].astype(np.int64)
        write_client(tmp_path / f"{name}.npz", x, y)
        (tmp_path / f"{name}.x").write_bytes(x.tobytes())
        (tmp_path / f"{name}.y").write_bytes(y.tobytes())
    return World(tmp_path, str(mosquitto.address), federation, classes)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["start", "within"])
def test_an_agent_in_a_jvm_takes_the_place_of_a_python_device_bit_by_bit(world: World, mode: str) -> None:
    """By a thread of its own, and by steps; a listener that throws and calls from within an event change nothing."""
    plain = world.train("first", {name: world.python("first", name) for name in ("one", "two")})

    jvm = world.jvm(mode, "one", mode)
    mixed = world.train(mode, {"one": jvm, "two": world.python(mode, "two")})

    assert jvm.code == 0, jvm.errors
    assert "stopped: true" in jvm.errors
    assert mixed.weights == plain.weights
    assert jvm.said().count("accepted") == ROUNDS, jvm.said()
    if mode == "within":
        assert "a listener's own fault" in jvm.errors
        assert jvm.errors.count("refused: only pause and setConstraints") == 3


@pytest.mark.slow
def test_options_that_cannot_be_used_are_exceptions_with_the_remedy(world: World) -> None:
    jvm = world.jvm("refused", "one", "refused")
    done = run_command(*jvm.command, timeout=PATIENCE_S)

    assert done.returncode == 0, done.stderr
    assert "WARNING in native method" not in done.stdout
    told = done.stderr.strip().splitlines()
    assert told[0].startswith("ARGUMENT: options.folder is required")
    assert told[1].startswith("CONFIG: ") and "no" in told[1]
    assert told[2].startswith("CONFIG: ") and "mirror" in told[2]
    assert told[3].startswith("CONFIG: ") and "device" in told[3]
    assert told[4].startswith("STORE: ")


@pytest.mark.slow
def test_a_row_that_cannot_be_read_declines_the_round_and_the_agent_lives(world: World) -> None:
    config = world.folder / "federation.toml"
    config.write_text(config.read_text().replace("min_devices = 2", "min_devices = 1"))
    jvm = [str(word) for word in world.jvm("broken", "one", "broken").command]
    server = [*EDGEFL, "server", "--config", str(config), "--broker", world.broker]
    server += ["--out", str(world.folder / "out")]
    with _process(jvm) as device, _process(server, EDGEFL_KEYS=str(world.folder / "keys")):
        lines = list(_until_declined(device))
        running = device.poll() is None

    assert running
    assert not [line for line in lines if "WARNING in native method" in line or "handler modified" in line]
    said = [json.loads(line) for line in lines if line.startswith("{")]
    assert said[-1]["details"] == {"round": 1}
    assert "row 0 of y cannot be read" in said[-1]["text"]
    assert said[-2]["event"] == "data"


@contextmanager
def _process(command: list[str], **environment: str) -> Iterator[subprocess.Popen[str]]:
    """Ended with the block, and before that by itself only after a while: what is read of it ends then."""
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, **environment},
    )
    patience = threading.Timer(PATIENCE_S, process.kill)
    patience.start()
    try:
        yield process
    finally:
        patience.cancel()
        process.kill()
        process.communicate()


def _until_declined(device: subprocess.Popen[str]) -> Iterator[str]:
    assert device.stdout is not None
    for line in device.stdout:
        yield line
        if '"event":"declined"' in line:
            return
