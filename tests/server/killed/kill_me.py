"""A server of the tiny plan in a process of its own, for tests that kill it."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec

from edgefl.wire.limits import Limits
from edgefl.wire.mqtt.address import Address
from edgefl_server.coordinator.states import EvaluationSchedule
from edgefl_server.events import Event
from edgefl_server.run_spec import RunSpec
from edgefl_server.service import Service
from edgefl_server.shards.pool import WorkerOptions
from edgefl_server.storage.retry import RetryingJournal
from tests.server.evaluations import with_evaluation
from tests.server.fleet import plan_for
from tests.support.listeners import CallingListener

LIMITS = Limits(chunk_bytes=1024, reconnect_min_s=0.02, reconnect_max_s=0.1)


def serve(events: Connection, port: int, federation: str, out: Path) -> None:
    """Three rounds of three devices, telling each event as JSON."""
    run(plan_of(federation), events, port, out)


def plan_of(federation: str) -> RunSpec:
    return plan_for(federation, LIMITS, rounds=3, min_devices=3, deadline_s=60.0)


VERSIONS = 5


def serve_versions(events: Connection, port: int, federation: str, out: Path) -> None:
    """As many versions, with an update of three each, of whatever devices there are."""
    run(versions_of(federation), events, port, out)


def versions_of(federation: str) -> RunSpec:
    rules = {"rounds": VERSIONS, "min_devices": 4, "buffer": 3, "max_staleness": 3, "deadline_s": 60.0}
    return replace(plan_for(federation, LIMITS, **rules), keep_updates=True)


def evaluated(federation: str) -> RunSpec:
    """Return the plan of one training round and one evaluation round of three devices."""
    rules = {"rounds": 1, "min_devices": 3, "min_reports": 3, "deadline_s": 60.0}
    return with_evaluation(plan_for(federation, LIMITS, **rules, evaluation=EvaluationSchedule(every=1)))


def serve_evaluation(events: Connection, port: int, federation: str, out: Path) -> None:
    run(evaluated(federation), events, port, out)


def serve_and_die(point: str, events: Connection, port: int, federation: str, out: Path) -> None:
    """Serve with two workers; the first process is killed as its evaluation round closes.

    That is behind ``stop_taking``, when the round is marked as closing, or before ``end_round``, when it is summed up.
    """
    journal, mark = getattr(RetryingJournal, point), out.with_suffix(".died")

    def die(self: RetryingJournal, of_run: str, number: int, **more: Any) -> Any:
        result = journal(self, of_run, number) if point == "stop_taking" else None
        if number == 2 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return journal(self, of_run, number, **more) if result is None else result

    setattr(RetryingJournal, point, die)
    run(evaluated(federation), events, port, out, workers=WorkerOptions(2))


def run(plan: RunSpec, events: Connection, port: int, out: Path, **options: Any) -> None:
    def emit(event: Event) -> None:
        events.send_bytes(msgspec.json.encode(event))

    Service(plan, Address("127.0.0.1", port), out, listener=CallingListener(emit), **options).run()
