"""Algorithms that need every device, and devices that decline, against a real Mosquitto."""

from __future__ import annotations

import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import Any

from edgefl.errors import ParticipationError
from edgefl.wire.mqtt.messages import NO_CARRY, Decline, Round, Task
from edgefl_server.events import (
    Finished,
    ParticipationDeclined,
    Refused,
    Rejected,
    RoundClosed,
    RoundOpened,
    Waiting,
    Warned,
)
from tests.server.fleet import (
    PATIENCE_S,
    MakeDevice,
    MakePlan,
    RunningServer,
    ScriptedDevice,
    Serve,
    assert_mean,
    needing_carry,
    silent,
)

BOTH = ("strong-0", "strong-1")


def declining(*rounds: int, reason: str = NO_CARRY, text: str = "it is gone") -> Any:
    """Answers as it should, and declines these rounds."""

    def answer(device: ScriptedDevice, task: Task, opened: Round) -> None:
        if task.round in rounds:
            word = Decline(round=task.round, nonce=task.nonce, reason=reason, text=text)
            device.say(device.mine.declines, word)
        else:
            device.report(task, opened)

    return answer


def ended(server: RunningServer) -> BaseException | None:
    assert server.thread is not None
    server.thread.join(PATIENCE_S)
    return server.error


def test_a_decline_does_not_delay_the_round(device: MakeDevice, serve: Any, tmp_path: Path) -> None:
    device("strong-0")
    device("strong-1", declining(1, reason="out-of-power", text="it is \x1b[2Jgone"))
    server = serve(rounds=1, min_devices=2)
    declined, closed = server.wait_for(ParticipationDeclined), server.wait_for(RoundClosed)
    server.join()
    assert (declined.device, declined.round) == ("strong-1", 1)
    assert (declined.reason, declined.text) == ("out-of-power", "it is  [2Jgone")
    assert (closed.outcome, closed.reports, closed.rejected) == ("closed", 1, 0)
    with sqlite3.connect(tmp_path / "out" / "journal.sqlite") as journal:
        rows = journal.execute("select device, status, reason from assignments order by device").fetchall()
    assert rows == [("strong-0", "accepted", ""), ("strong-1", "declined", "out-of-power")]


def test_declines_that_answer_no_task_are_refused_or_ignored(device: MakeDevice, serve: Any) -> None:
    odd = device("strong-0", silent)
    server = serve(rounds=1)
    opened, task = odd.wait_open(), odd.tasks.get(timeout=PATIENCE_S)
    for number, nonce in ((1, "?"), (0, task.nonce), (2**63 - 1, task.nonce)):
        odd.say(odd.mine.declines, Decline(round=number, nonce=nonce, reason=NO_CARRY))
    odd.session.publish(odd.mine.declines, b"\x00 no msgpack")
    assert [server.wait_for(Rejected).reason for _ in range(2)] == ["wrong-nonce", "malformed"]
    odd.report(task, opened)
    assert server.wait_for(RoundClosed).reports == 1
    assert not server.seen_of(ParticipationDeclined)


def test_a_round_is_retried_once_a_device_is_back(device: MakeDevice, serve: Any, tmp_path: Path) -> None:
    device("strong-0")
    lost = device("strong-1", lambda device, task, opened: device.vanish())
    server = serve(rounds=2, min_devices=2, whole=True, offline_grace_s=0.2)
    waiting = server.wait_for(Waiting, lambda event: event.next_round == 2)
    assert (waiting.known, waiting.needed, waiting.missing) == (1, 2, ("strong-1",))
    lost.stop()
    device("strong-1")
    server.wait_for(Finished)
    server.join()
    first, second = server.seen_of(RoundClosed)
    assert first.outcome == "abandoned" and "strong-1 (it has been offline" in first.text
    assert (second.outcome, second.reports) == ("closed", 2)
    assert_mean(tmp_path / "out", [(each, "strong", 2) for each in BOTH])


def test_a_refused_run_can_be_resumed(device: MakeDevice, serve: Any, tmp_path: Path) -> None:
    steady = device("strong-0")
    device("strong-1", declining(2, reason="busy"))
    rules = {"rounds": 3, "min_devices": 2, "whole": True, "absent": "refuse"}
    server = serve(**rules)
    refused = server.wait_for(Refused)
    error = ended(server)
    assert isinstance(error, ParticipationError) and error.message == refused.text
    assert error.exit_code == 13
    assert "round 2" in refused.text and "strong-1 (it declined (busy))" in refused.text
    assert steady.done().base == 1, "devices that wait for the end hear of it"
    assert not (tmp_path / "out" / "model.safetensors").exists()
    server.error = None

    again = serve(**rules)
    closed = again.wait_for(RoundClosed, lambda event: event.round == 3)
    again.wait_for(Finished)
    again.join()
    assert (closed.outcome, closed.reports) == ("closed", 2) and steady.done().base == 3


def test_a_lost_state_restarts_the_method(device: MakeDevice, serve: Serve, plan_of: MakePlan) -> None:
    steady = device("strong-0")
    device("strong-1", declining(2))
    plan = plan_of(rounds=4, min_devices=2, whole=True, opening=1)
    opening = replace(plan.main, hyper={"lr": 9.0})
    server = serve(replace(plan, opening=(opening,), tiers=needing_carry(plan.tiers)))
    warned = server.wait_for(Warned)
    server.wait_for(Finished)
    server.join()
    assert "strong-1 has lost what it kept of round 1" in warned.text
    announced = {each.round: each for each in opened_rounds(steady)}
    assert [announced[number].base for number in (1, 2, 3, 4)] == [0, 1, 1, 3]
    assert [announced[number].hyper["lr"] for number in (1, 2, 3, 4)] == [9.0, 0.1, 9.0, 0.1]
    closed = server.seen_of(RoundClosed)
    assert [each.outcome for each in closed] == ["closed", "abandoned", "closed", "closed"]


def opened_rounds(device: ScriptedDevice) -> list[Round]:
    found = []
    while not device.rounds.empty():
        if (each := device.rounds.get()).state == "open":
            found.append(each)
    return found


def test_a_restarted_server_knows_the_members_and_newcomers_wait(device: MakeDevice, serve: Any) -> None:
    two, rules = [device(name, silent) for name in BOTH], {"rounds": 2, "min_devices": 2, "whole": True}
    first = serve(**rules)
    for each in two:
        each.report(each.tasks.get(timeout=PATIENCE_S), each.wait_open(1))
    first.wait_for(RoundOpened, lambda event: event.round == 2)
    first.stop()

    device("strong-2")
    second = serve(**rules)
    assert "strong-2 came after the method began" in second.wait_for(Warned).text
    for each in two:
        opened = each.wait_open(2)
        each.report(each.tasks.get(timeout=PATIENCE_S), opened)
    closed = second.wait_for(RoundClosed, lambda event: event.round == 2)
    second.join()
    assert closed.reports == 2 and opened.base == 1
