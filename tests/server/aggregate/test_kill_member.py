"""``kill -9`` while a method begins again: it begins again once, with the same rounds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from edgefl.wire.limits import Limits
from tests.conftest import Mosquitto
from tests.server.aggregate import kill_member
from tests.server.fleet import ScriptedDevice
from tests.server.killed.victim import Victim
from tests.server.service.test_service_participation import declining, opened_rounds


@pytest.fixture
def devices(mosquitto: Mosquitto, federation: str, limits: Limits) -> Iterator[list[ScriptedDevice]]:
    answers = {"strong-0": None, "strong-1": declining(2)}
    made = [
        ScriptedDevice(mosquitto.address, federation, name, limits, answer)
        for name, answer in answers.items()
    ]
    yield made
    for device in made:
        device.stop()


@pytest.mark.slow
def test_a_restart_of_the_method_survives_kills(
    devices: list[ScriptedDevice], mosquitto: Mosquitto, federation: str, tmp_path: Path
) -> None:
    victim = Victim(mosquitto.port, federation, tmp_path, serve=kill_member.serve)
    try:
        victim.kill_at(lambda event: event["event"] == "declined")
        victim.kill_at(lambda event: event["event"] == "warned")
        told, _ = victim.finish()
    finally:
        victim.kill()
    announced = {each.round: (each.base, each.hyper["lr"]) for each in opened_rounds(devices[0])}
    assert announced == {1: (0, 9.0), 2: (1, 0.1), 3: (1, 9.0), 4: (3, 0.1)}
    outcomes = {each["round"]: each["outcome"] for each in told}
    assert outcomes | {1: "closed"} == {1: "closed", 2: "abandoned", 3: "closed", 4: "closed"}
