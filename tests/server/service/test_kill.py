"""``kill -9`` at any instant: the run ends with the same bits as if nobody had been killed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from edgefl.wire.limits import Limits
from tests.conftest import Mosquitto
from tests.server.fleet import ScriptedDevice

NAMES = ("strong-0", "strong-1", "weak-0")


class Victim:
    """The server process; its events come line by line."""

    def __init__(
        self, port: int, federation: str, out: Path, *, module: str = "tests.server.service.kill_me"
    ) -> None:
        self._command = [sys.executable, "-m", module, str(port), federation, str(out)]
        self.out = out
        self.start()

    def start(self) -> None:
        root = Path(__file__).parents[3]
        self.process = subprocess.Popen(self._command, stdout=subprocess.PIPE, cwd=root)

    def events(self) -> Iterator[dict[str, Any]]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            yield json.loads(line)

    def kill_at(self, condition: Callable[[dict[str, Any]], bool]) -> None:
        """SIGKILL as soon as an event fits, then start again."""
        for event in self.events():
            if condition(event):
                break
        self.process.kill()
        self.process.wait()
        self.start()

    def finish(self) -> tuple[list[dict[str, Any]], bytes]:
        told = [event for event in self.events() if event["event"] == "roundclosed"]
        assert self.process.wait(300) == 0
        return told, (self.out / "model.safetensors").read_bytes()


@pytest.fixture
def run(mosquitto: Mosquitto, limits: Limits, tmp_path: Path) -> Iterator[Callable[[str], Victim]]:
    devices: list[ScriptedDevice] = []
    victims: list[Victim] = []

    def start(federation: str) -> Victim:
        devices.extend(ScriptedDevice(mosquitto.address, federation, name, limits) for name in NAMES)
        victims.append(Victim(mosquitto.port, federation, tmp_path / federation))
        return victims[-1]

    yield start
    for device in devices:
        device.stop()
    for victim in victims:
        victim.process.kill()


def test_a_killed_server_ends_with_the_same_model(run: Callable[[str], Victim], federation: str) -> None:
    undisturbed = run(federation)
    disturbed = run(f"{federation}-killed")
    disturbed.kill_at(lambda event: event["event"] == "roundopened" and event["round"] == 1)
    disturbed.kill_at(lambda event: event["event"] == "deviceseen" and event["round"] == 2)
    disturbed.kill_at(lambda event: event["event"] == "roundclosed" and event["round"] >= 2)
    rounds, model = disturbed.finish()
    calm_rounds, calm_model = undisturbed.finish()
    assert model == calm_model
    assert rounds[-1]["weights_sha256"] == calm_rounds[-1]["weights_sha256"]
    assert rounds[-1]["round"] == 3 and rounds[-1]["reports"] == 3
