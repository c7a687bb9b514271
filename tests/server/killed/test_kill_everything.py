"""All that a fleet's server consists of is killed at random: server, workers, broker, database, page. Same weights."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from edgefl.wire.limits import Limits
from tests import needs
from tests.conftest import Mosquitto
from tests.server.dashboard.served import PageProcess
from tests.server.killed import kill_fleet
from tests.server.killed.kill_fleet import KilledFleet
from tests.server.killed.victim import Victim
from tests.server.shards.databases import Postgres

DEVICES = 200
KILLS = 20


@pytest.fixture
def started() -> Iterator[ExitStack]:
    """All that ends with the test."""
    with ExitStack() as stack:
        yield stack


def worker_pids(server: int | None) -> list[int]:
    """Of the workers that the server has just now."""
    with suppress(psutil.Error):
        children = psutil.Process(server).children()
        return [child.pid for child in children if "edgefl_server.workers.process" in child.cmdline()]
    return []


class Told(Victim):
    """A server that never waits for somebody to hear its events: ``told`` has them all, of every process of it."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.told: list[dict[str, Any]] = []
        super().__init__(*arguments, **options)

    def start(self) -> None:
        super().start()
        threading.Thread(target=self._hear, args=(self.events(),), daemon=True).start()

    def _hear(self, events: Iterator[dict[str, Any]]) -> None:
        self.told += events

    def wait_for(self, event: str) -> None:
        while not any(each["event"] == event for each in list(self.told)):
            time.sleep(0.01)


class Parts:
    """What may be killed. The server is started again as a supervisor does it, as it ends where its database is away."""

    def __init__(self, broker: Mosquitto, database: Postgres, victim: Victim, started: ExitStack) -> None:
        self._broker, self._database, self._victim = broker, database, victim
        self._started = started
        self._page = self._open_page()
        self.killed = dict.fromkeys(("server", "worker", "broker", "database", "page"), 0)

    def kill(self, what: str, chance: random.Random) -> None:
        """Kill it, and have it again a moment later."""
        pause = chance.uniform(0.0, 0.3)
        if what == "worker":
            while not (workers := worker_pids(self._victim.process.pid)):
                if not self.supervise():
                    return
                time.sleep(0.01)
            os.kill(chance.choice(workers), signal.SIGKILL)
        elif what == "server":
            self._victim.kill()
            time.sleep(pause)
            self._victim.start()
        elif what == "broker":
            self._broker.kill()
            time.sleep(pause)
            self._broker.start()
        elif what == "database":
            self._database.stop()
            time.sleep(pause)
            self._database.start()
        else:
            self._page.kill()
            self._page = self._open_page()
        self.killed[what] += 1

    def _open_page(self) -> PageProcess:
        page = PageProcess([str(self._victim.out), "--database", self._database.url])
        return self._started.enter_context(page)

    def supervise(self) -> bool:
        """Start a server again that ended by an error. Whether the run goes on."""
        process = self._victim.process
        if process.is_alive():
            return True
        if process.exitcode == 0:
            return False
        self._victim.start()
        return True


@pytest.mark.slow
def test_the_weights_are_those_of_an_undisturbed_run(
    started: ExitStack, federation: str, limits: Limits, tmp_path: Path
) -> None:
    needs.require("mosquitto")
    database = Postgres()
    started.callback(database.stop)
    broker = started.enter_context(Mosquitto(tmp_path))
    fleet = KilledFleet(broker, limits, DEVICES)
    fleet.train(federation, tmp_path / "calm", kill_fleet.LONG)

    fleet.join(f"{federation}-killed", started)
    serve = partial(kill_fleet.serve_with_workers, database.url)
    victim = Told(broker.port, f"{federation}-killed", tmp_path / "killed", serve=serve)
    started.callback(victim.kill)
    victim.wait_for("roundopened")
    parts = Parts(broker, database, victim, started)
    chance = random.Random(7)
    # Each as often as the others, in an order of chance.
    order = chance.sample([*parts.killed] * (KILLS // len(parts.killed)), KILLS)
    while order and parts.supervise():
        time.sleep(chance.uniform(0.0, 2.0))
        parts.kill(order.pop(), chance)
    while parts.supervise():
        victim.process.join(1.0)
    last = [event for event in victim.told if event["event"] == "roundclosed"][-1]

    assert min(parts.killed.values()) > 0, parts.killed
    assert last["round"] == kill_fleet.LONG and last["reports"] == DEVICES
    calm, model = (tmp_path / name / "model.safetensors" for name in ("calm", "killed"))
    assert model.read_bytes() == calm.read_bytes()
