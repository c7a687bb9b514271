"""``kill -9`` in an evaluation round: each accepted report counts once, and the sums are exact."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from edgefl.wire.limits import Limits
from edgefl.wire.mqtt.messages import Round, Task
from tests.conftest import Mosquitto
from tests.server.evaluations import honest, report_sums, take_part, total_of
from tests.server.fleet import PATIENCE_S, ScriptedDevice
from tests.server.killed import kill_me
from tests.server.killed.victim import Victim

NAMES = ("strong-0", "strong-1", "weak-2")


@pytest.fixture
def started() -> Iterator[ExitStack]:
    """Devices and servers that end with the test."""
    with ExitStack() as stack:
        yield stack


def evaluation_of(victim: Victim) -> dict[str, Any]:
    """Return the results of the evaluation round, which the victim ends."""
    rounds, _ = victim.finish()
    (found,) = [closed["evaluation"] for closed in rounds if closed["round"] == 2]
    return dict(found)


def test_reports_from_before_the_kill_count_once(
    started: ExitStack, mosquitto: Mosquitto, federation: str, limits: Limits, tmp_path: Path
) -> None:
    killed, sent = threading.Event(), dict[str, tuple[bytes, Task]]()

    def answer(own: ScriptedDevice, task: Task, opened: Round) -> None:
        """Report twice; the device of the weak tier only after the kill, when its task comes again."""
        if task.round == 1:
            own.report(task, opened)
        elif own.name != NAMES[-1] or killed.is_set():
            sent[own.name] = report_sums(own, task, opened, honest(own.name)), task
            own.send(*sent[own.name])

    devices = [ScriptedDevice(mosquitto.address, federation, name, limits, answer) for name in NAMES]
    for device in devices:
        started.callback(device.stop)
    victim = Victim(mosquitto.port, federation, tmp_path / "out", serve=kill_me.serve_evaluation)
    started.callback(victim.kill)
    accepted: set[str] = set()
    for event in victim.events():
        if event["event"] == "deviceseen" and (event["round"], event["stage"]) == (2, "reported"):
            accepted.add(event["device"])
        if len(accepted) == 2:
            break
    victim.kill()
    killed.set()
    victim.start()
    opened = next(event for event in victim.events() if event["event"] == "started")
    for device in devices[:2]:
        device.send(*sent[device.name])
    found = evaluation_of(victim)

    assert opened["resumed"] and accepted == set(NAMES[:2])
    assert found["sums"] == total_of(*NAMES)
    assert found["devices"]["devices"] == 3 and found["devices"]["rows"] == 24


@pytest.mark.parametrize("point", ["stop_taking", pytest.param("end_round", marks=pytest.mark.slow)])
def test_a_round_that_was_killed_as_it_closed_is_closed_again(
    point: str, started: ExitStack, mosquitto: Mosquitto, federation: str, limits: Limits, tmp_path: Path
) -> None:
    for name in NAMES:
        started.callback(ScriptedDevice(mosquitto.address, federation, name, limits, take_part).stop)
    serve = partial(kill_me.serve_and_die, point)
    victim = Victim(mosquitto.port, federation, tmp_path / "out", serve=serve)
    started.callback(victim.kill)
    assert not any(event["event"] == "roundclosed" and event["round"] == 2 for event in victim.events())
    victim.process.join(PATIENCE_S)
    with closing(sqlite3.connect(tmp_path / "out" / "journal.sqlite")) as journal:
        ((left,),) = journal.execute("SELECT state FROM rounds WHERE round = 2").fetchall()
    victim.start()
    found = evaluation_of(victim)

    assert left == "closing"
    assert found["sums"] == total_of(*NAMES)
    assert found["devices"]["devices"] == 3
