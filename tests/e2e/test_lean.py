"""A server without torch in its process: while it waits, and where the process that has torch is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.conftest import Mosquitto
from tests.e2e.runs import EDGEFL, PATIENCE_S, TINY, Calm, Run

pytestmark = pytest.mark.e2e


def workshop_of(server: int) -> int:
    """The process that a server has started, from whichever of its threads; 0 while there is none."""
    for children in Path(f"/proc/{server}/task").glob("*/children"):
        with suppress(OSError):  # that thread has ended
            if pids := children.read_text().split():
                return int(pids[0])
    return 0


def libraries(pid: int) -> str:
    return Path(f"/proc/{pid}/maps").read_text()


def wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline, f"process {pid} outlived its server"
        time.sleep(0.02)


def test_a_server_that_waits_for_devices_has_loaded_neither_torch_nor_a_compiler(
    tmp_path: Path, mosquitto: Mosquitto
) -> None:
    config = tmp_path / "waits.toml"
    config.write_text(TINY + "[tiers.strong]\n")
    broker = f"127.0.0.1:{mosquitto.address.port}"
    command = [*EDGEFL, "server", "--config", str(config), "--out", str(tmp_path / "out"), "--broker", broker]
    with subprocess.Popen([*command, "--json"], stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        said = (json.loads(line)["event"] for line in server.stdout)
        assert "waiting" in said
        loaded, workshop = libraries(server.pid), workshop_of(server.pid)
        assert "libtorch" not in loaded and "llvmlite" not in loaded and "_multiarray_umath" in loaded
        assert "libtorch" in libraries(workshop)
        server.kill()
    wait_until_gone(workshop)


def test_a_workshop_that_is_killed_in_mid_run_changes_no_bit(tmp_path: Path, calm: Calm) -> None:
    run = calm.beside(tmp_path / "run")
    for number in (1, 3):
        run.wait_until(lambda rounds=number: len(run.rounds) >= rounds, f"round {number}")  # type: ignore[misc]
        _kill_workshop(run)
    again = run.finish()

    assert [row["weights_sha256"] for row in again] == [row["weights_sha256"] for row in calm.rounds]
    assert [(row["accuracy"], row["loss"]) for row in again] == [
        (row["accuracy"], row["loss"]) for row in calm.rounds
    ]


def _kill_workshop(run: Run) -> None:
    run.wait_until(lambda: workshop_of(run.pids()["server"]) > 0, "process that computes with models")
    os.kill(workshop_of(run.pids()["server"]), signal.SIGKILL)
