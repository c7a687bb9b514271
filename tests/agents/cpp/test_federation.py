"""C++ agents, one of them embedded by its C interface, train in place of Python's: the same weights, bit by bit, also where
each is killed at every stage of a round and started again, with a clock that is a day ahead, then a day behind."""

from __future__ import annotations

import sqlite3
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from edgefl.data.dataset import write_client
from edgefl.data.datasets import digits
from tests.agents.cpp.build import embedded, program
from tests.agents.cpp.federations import PYTHON, Device, train
from tests.conftest import BrokerProcess
from tests.e2e.runs import TINY

pytestmark = pytest.mark.e2e
ROUNDS = 3
ROWS = 60
CONFIG = (
    TINY.replace('name = "e2e"', f'name = "cpp"\nrounds = {ROUNDS}\nseed = 7').replace(
        "steps = 3", "steps = 40"
    )
    + """
[export]
formats = ["onnx", "executorch"]
[round]
min_devices = 3
[tiers.strong]
[tiers.weak]
cut = 1
chunks = 1
"""
)
TIERS = {"one": ("onnx", "strong"), "two": ("executorch", "weak"), "three": ("onnx", "strong")}
DAY_S = 86_400
MOMENTS = ("chunks", "job", "checkpoint", "outbox", "job", "checkpoint")


def finished(folder: Path) -> list[float]:
    """When its rounds ended, by the clock of a device."""
    with closing(sqlite3.connect(folder / "store.sqlite3")) as db:
        found = [float(at) for (at,) in db.execute("SELECT finished_at FROM history")]
    assert found
    return found


@pytest.mark.slow
def test_killed_agents_end_with_the_same_weights_as_pythons(tmp_path: Path, mosquitto: BrokerProcess) -> None:
    broker, data = str(mosquitto.address), digits()
    config = tmp_path / "federation.toml"
    config.write_text(CONFIG)
    for place, name in enumerate(TIERS):
        rows = slice(place * ROWS, (place + 1) * ROWS)
        x, y = data.train_x[rows], data.train_y[rows].astype(np.int64)
        write_client(tmp_path / f"{name}.npz", x, y)
        (tmp_path / f"{name}.x").write_bytes(x.tobytes())
        (tmp_path / f"{name}.y").write_bytes(y.tobytes())

    clock = {"LD_PRELOAD": str(program("tests/libshifted_clock.so"))}
    clocks = [clock | {"CLOCK_SHIFT_S": str(shift)} for shift in (DAY_S, -DAY_S)]

    def device(run: str, name: str, agent: tuple[str | Path, ...], moments: tuple[str, ...] = ()) -> Device:
        engine, tier = TIERS[name]
        folder = tmp_path / run / name
        command = [*agent, "--id", name, "--federation", "cpp", "--broker", broker, "--engine", engine]
        command += ["--tier", tier, "--data", tmp_path / f"{name}.npz", "--store", folder, "--until-done"]
        own = clocks if moments else [{}]
        return Device([*command, "--json", "--limit", "checkpoint_steps=3"], folder, moments, own)

    cpp = (program("edgefl-agent"),)
    host = Device(
        [
            *(embedded(), broker, "cpp", "three", tmp_path / "cpp" / "three", "onnx"),
            *(tmp_path / "three.x", tmp_path / "three.y"),
        ],
        tmp_path / "cpp" / "three",
    )
    calm = train(
        tmp_path / "python", config, broker, {name: device("python", name, PYTHON) for name in TIERS}
    )
    disturbed = train(
        tmp_path / "cpp",
        config,
        broker,
        {"one": device("cpp", "one", cpp, MOMENTS), "two": device("cpp", "two", cpp, MOMENTS), "three": host},
        bundles=tmp_path / "python" / "out" / "bundles",
    )

    assert [(each["outcome"], each["reports"]) for each in disturbed.rounds] == [("closed", 3)] * ROUNDS
    for each in disturbed.devices.values():
        assert each.code == 0, each.errors
        assert "accepted" in each.said()
        assert {"failed", "declined", "refused"}.isdisjoint(each.said())
    for name in ("one", "two"):
        assert len(disturbed.devices[name].killed) >= 4
        assert all(abs(at - time.time()) > DAY_S / 2 for at in finished(tmp_path / "cpp" / name))
    assert disturbed.weights == calm.weights
