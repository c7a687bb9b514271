"""A server whose algorithm needs every device and can begin again, to be killed: see :mod:`tests.server.killed.kill_me`."""

from __future__ import annotations

from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

from tests.server.fleet import needing_carry, plan_for
from tests.server.killed.kill_me import LIMITS, run


def serve(events: Connection, port: int, federation: str, out: Path) -> None:
    plan = plan_for(federation, LIMITS, rounds=4, min_devices=2, whole=True, opening=1)
    opening = replace(plan.main, hyper={"lr": 9.0})
    run(replace(plan, opening=(opening,), tiers=needing_carry(plan.tiers)), events, port, out)
