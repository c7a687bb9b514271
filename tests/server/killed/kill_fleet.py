"""A server of the tiny plan for many devices, to be killed: see :mod:`tests.server.killed.kill_me`."""

from __future__ import annotations

from multiprocessing.connection import Connection
from pathlib import Path

from edgefl_server.run_spec import RunSpec
from edgefl_server.shards.pool import WorkerOptions
from tests.server.fleet import plan_for
from tests.server.killed.kill_me import LIMITS, run

ROUNDS = 6


LONG = 12


def plan_of(federation: str, devices: int, rounds: int = ROUNDS) -> RunSpec:
    """Rounds that need every device: each has one right result."""
    return plan_for(
        federation, LIMITS, rounds=rounds, min_devices=devices, min_reports=devices, deadline_s=120.0
    )


def serve_200(events: Connection, port: int, federation: str, out: Path) -> None:
    run(plan_of(federation, 200), events, port, out)


def serve_24(events: Connection, port: int, federation: str, out: Path) -> None:
    run(plan_of(federation, 24), events, port, out)


def serve_with_workers(database: str, events: Connection, port: int, federation: str, out: Path) -> None:
    """200 devices for a while, two workers, and a journal in a database that others look into."""
    run(plan_of(federation, 200, LONG), events, port, out, workers=WorkerOptions(2), database=database)
