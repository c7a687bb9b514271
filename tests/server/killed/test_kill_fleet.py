"""Broker and server killed at random while a fleet trains: every update counts once, and the weights are the same."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from edgefl.wire.limits import Limits
from tests import needs
from tests.conftest import Mosquitto
from tests.server.killed import kill_fleet
from tests.server.killed.kill_fleet import KilledFleet
from tests.server.killed.victim import Victim


@pytest.fixture
def started() -> Iterator[ExitStack]:
    """All that ends with the test."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def own_broker(tmp_path: Path) -> Iterator[Mosquitto]:
    """One that may be killed."""
    needs.require("mosquitto")
    with Mosquitto(tmp_path) as broker:
        yield broker


def test_the_weights_are_those_of_an_undisturbed_run(
    started: ExitStack, own_broker: Mosquitto, federation: str, limits: Limits, tmp_path: Path
) -> None:
    fleet = KilledFleet(own_broker, limits, 24)
    fleet.train(federation, tmp_path / "calm", kill_fleet.ROUNDS)

    fleet.join(f"{federation}-killed", started)
    victim = Victim(own_broker.port, f"{federation}-killed", tmp_path / "killed", serve=kill_fleet.serve_24)
    started.callback(victim.kill)
    chance = random.Random(24)
    next(event for event in victim.events() if event["event"] == "roundopened")
    killed = {"server": 0, "broker": 0}
    while sum(killed.values()) < 4 and victim.process.is_alive():
        what = chance.choice(sorted(killed))
        one = victim if what == "server" else own_broker
        time.sleep(chance.uniform(0.0, 0.3))
        one.kill()
        time.sleep(chance.uniform(0.0, 0.3))
        one.start()
        killed[what] += 1
    rounds, model = victim.finish()

    assert min(killed.values()) > 0
    assert model == (tmp_path / "calm" / "model.safetensors").read_bytes()
    assert rounds[-1]["round"] == kill_fleet.ROUNDS and rounds[-1]["reports"] == 24
