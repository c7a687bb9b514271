"""A server of the tiny plan for many devices, to be killed: see :mod:`tests.server.killed.kill_me`."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec

from edgefl.wire.limits import Limits
from edgefl_server.run_spec import RunSpec
from edgefl_server.shards.pool import WorkerOptions
from tests.conftest import BrokerProcess
from tests.server.fleet import RunningServer, ScriptedDevice, plan_for
from tests.server.killed.kill_me import LIMITS, run

ROUNDS, LONG = 6, 12


def plan_of(federation: str, devices: int, rounds: int = ROUNDS) -> RunSpec:
    """Rounds that need every device: each has one right result."""
    return plan_for(
        federation, LIMITS, rounds=rounds, min_devices=devices, min_reports=devices, deadline_s=120.0
    )


@dataclass
class KilledFleet:
    """So many scripted devices on a broker. They dial less often than in other tests: together they would leave no time."""

    broker: BrokerProcess
    limits: Limits
    count: int

    def join(self, federation: str, until: ExitStack) -> None:
        limits = msgspec.structs.replace(self.limits, reconnect_min_s=0.2, reconnect_max_s=1.0)
        for number in range(self.count):
            name = f"strong-{number}" if number % 3 else f"weak-{number}"
            until.callback(ScriptedDevice(self.broker.address, federation, name, limits).stop)

    def train(self, federation: str, out: Path, rounds: int) -> None:
        """Train undisturbed, to the end."""
        with ExitStack() as devices:
            self.join(federation, devices)
            RunningServer.start(plan_of(federation, self.count, rounds), self.broker.address, out).join()


def serve_24(events: Connection, port: int, federation: str, out: Path) -> None:
    run(plan_of(federation, 24), events, port, out)


def serve_with_workers(database: str, events: Connection, port: int, federation: str, out: Path) -> None:
    """200 devices for a while, two workers, and a journal in a database that others look into."""
    run(plan_of(federation, 200, LONG), events, port, out, workers=WorkerOptions(2), database=database)
