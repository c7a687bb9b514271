"""``kill -9`` at any instant: the run ends with the same bits as if nobody had been killed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from edgefl.wire.limits import Limits
from edgefl_server.events import RoundClosed
from tests.conftest import Mosquitto
from tests.server.fleet import RunningServer, ScriptedDevice
from tests.server.killed.kill_me import plan_of
from tests.server.killed.victim import Victim

NAMES = ("strong-0", "strong-1", "weak-0")


@pytest.fixture
def started() -> Iterator[ExitStack]:
    """Devices and servers that end with the test."""
    with ExitStack() as stack:
        yield stack


def test_a_killed_server_ends_with_the_same_model(
    started: ExitStack, mosquitto: Mosquitto, federation: str, limits: Limits, tmp_path: Path
) -> None:
    def devices(of: str) -> None:
        for name in NAMES:
            started.callback(ScriptedDevice(mosquitto.address, of, name, limits).stop)

    devices(federation)
    devices(f"{federation}-killed")
    disturbed = Victim(mosquitto.port, f"{federation}-killed", tmp_path / "killed")
    started.callback(disturbed.kill)
    undisturbed = RunningServer.start(plan_of(federation), mosquitto.address, tmp_path / "calm")

    disturbed.kill_at(lambda event: event["event"] == "roundopened" and event["round"] == 1)
    disturbed.kill_at(lambda event: event["event"] == "deviceseen" and event["round"] == 2)
    disturbed.kill_at(lambda event: event["event"] == "roundclosed" and event["round"] >= 2)
    rounds, model = disturbed.finish()
    undisturbed.join()

    assert model == (tmp_path / "calm" / "model.safetensors").read_bytes()
    assert rounds[-1]["weights_sha256"] == undisturbed.seen_of(RoundClosed)[-1].weights_sha256
    assert rounds[-1]["round"] == 3 and rounds[-1]["reports"] == 3
