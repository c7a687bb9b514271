"""Broker and server killed at random while a fleet trains: every update counts once, and the weights are the same."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest

from edgefl.wire.limits import Limits
from tests import needs
from tests.conftest import Mosquitto
from tests.server.fleet import RunningServer, ScriptedDevice
from tests.server.killed import kill_fleet
from tests.server.killed.victim import Serve, Victim


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


@pytest.mark.parametrize(
    ("count", "kills", "serve"),
    [
        (24, 4, kill_fleet.serve_24),
        pytest.param(200, 12, kill_fleet.serve_200, marks=pytest.mark.slow),
    ],
)
def test_the_weights_are_those_of_an_undisturbed_run(
    count: int,
    kills: int,
    serve: Serve,
    started: ExitStack,
    own_broker: Mosquitto,
    federation: str,
    limits: Limits,
    tmp_path: Path,
) -> None:
    # So many that dial at once, as often as other tests have them do, would leave no time for anything else.
    limits = msgspec.structs.replace(limits, reconnect_min_s=0.2, reconnect_max_s=1.0)

    def join(of: str, until: ExitStack) -> None:
        for number in range(count):
            name = f"strong-{number}" if number % 3 else f"weak-{number}"
            until.callback(ScriptedDevice(own_broker.address, of, name, limits).stop)

    with ExitStack() as undisturbed:
        join(federation, undisturbed)
        plan = kill_fleet.plan_of(federation, count)
        RunningServer.start(plan, own_broker.address, tmp_path / "calm").join()

    join(f"{federation}-killed", started)
    victim = Victim(own_broker.port, f"{federation}-killed", tmp_path / "killed", serve=serve)
    started.callback(victim.kill)
    chance = random.Random(count)
    next(event for event in victim.events() if event["event"] == "roundopened")
    killed = {"server": 0, "broker": 0}
    while sum(killed.values()) < kills and victim.process.is_alive():
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
    assert rounds[-1]["round"] == kill_fleet.ROUNDS and rounds[-1]["reports"] == count
