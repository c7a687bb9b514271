"""The hello of a device, its subscription to rounds, and the rate of its reports."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from edgefl.wire.limits import Limits
from edgefl.wire.mqtt.messages import COME_LATER, Ack, Conditions, Task, encode
from edgefl_device.link import presence
from edgefl_device.link.presence import NoticeLimiter
from edgefl_device.policy import OwnerPolicy
from tests.device_runtime.agent.agents import StartAgent
from tests.device_runtime.agent.scripted import RunningAgent, ScriptedServer
from tests.device_runtime.tiny import World
from tests.wire.mqtt.events import PATIENCE_S

# -- hello -----------------------------------------------------------------------------------------------------


def test_a_device_says_hello_again_when_its_conditions_change(
    server: ScriptedServer, start: StartAgent, tmp_path: Path, limits: Limits
) -> None:
    state = tmp_path / "state.txt"
    state.write_text("power = battery\nlink = metered\n")
    limits = msgspec.structs.replace(limits, conditions_s=0.05)
    start(limits=limits, policy=OwnerPolicy(surroundings=("cat", str(state))))
    first = server.hello()
    told = first.conditions
    assert isinstance(told, Conditions) and first.again is msgspec.UNSET
    assert (told.power, told.link, told.available) == ("battery", "metered", True)

    other = tmp_path / "other.txt"
    other.write_text("power = charging\nlink = metered\navailable = no\n")
    other.rename(state)
    second = server.hello()
    told = second.conditions
    assert isinstance(told, Conditions) and second.again is True
    assert (told.power, told.link, told.available) == ("charging", "metered", False)


def test_a_device_tells_nothing_against_its_owner(server: ScriptedServer, start: StartAgent) -> None:
    start(policy=OwnerPolicy(tell=False))
    assert server.hello().conditions is msgspec.UNSET


def test_a_device_that_is_told_to_come_later_says_hello_again_then(
    server: ScriptedServer, start: StartAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(presence, "SOONEST_S", 0.0)
    agent = start()
    server.hello()
    ack = Ack(round=0, nonce="", status="rejected", reason=COME_LATER, text="no room", later_s=0.05)
    server.publish(server.mine.acks, encode(ack))
    assert agent.event("refused").text == "no room"
    assert server.hello().again is msgspec.UNSET


# -- subscription ----------------------------------------------------------------------------------------------


def rests(agent: RunningAgent) -> bool:
    """Whether it has stopped listening, or does so soon."""
    deadline = time.monotonic() + PATIENCE_S
    while not agent.agent.subscription.is_paused and time.monotonic() < deadline:
        time.sleep(0.01)
    return agent.agent.subscription.is_paused


def announce(server: ScriptedServer, world: World, *numbers: int) -> None:
    for number in numbers:
        server.announce(world.announcement(number=number, base=number - 1))


def heard(agent: RunningAgent) -> int:
    announced = agent.agent.rounds.announced
    return announced.round if announced is not None else 0


def test_resting_devices_take_the_next_task(server: ScriptedServer, start: StartAgent, world: World) -> None:
    agent = start(until_done=True)
    server.hello()
    server.publish_blobs(world)
    announce(server, world, 1, 2, 3)
    assert rests(agent) and heard(agent) == 3

    announce(server, world, 4, 5)
    server.assign(world.task(number=5))
    server.ack(server.update(5))
    assert agent.event("accepted").details["round"] == 5
    assert heard(agent) == 5 and not agent.agent.subscription.is_paused

    announce(server, world, 6, 7, 8)
    assert rests(agent)
    server.announce(msgspec.structs.replace(world.announcement(number=9, base=8), state="done"))
    server.assign(Task(run="run", round=9, tier="weak", seed=0, nonce=""))
    assert agent.ended() is None


def test_a_device_with_tasks_listens_on(server: ScriptedServer, start: StartAgent, world: World) -> None:
    agent = start()
    for number in range(1, 6):
        server.open(world, number=number, base=number - 1)
        server.ack(server.update(number))
        agent.event("accepted")
    assert not agent.agent.subscription.is_paused


# -- rate of reports -------------------------------------------------------------------------------------------


def test_a_notice_is_due_once_in_its_period(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(presence, "time", SimpleNamespace(monotonic=lambda: now[0]))
    notices = NoticeLimiter(5.0)

    assert [notices.is_due("a"), notices.is_due("a"), notices.is_due("b")] == [True, False, True]
    now[0] = 4.9
    assert not notices.is_due("a")
    now[0] = 5.0
    assert notices.is_due("a")
    assert notices.suppressed == 2


def test_few_notices_are_remembered() -> None:
    notices = NoticeLimiter(1e9)

    assert all(notices.is_due(number) for number in range(10_000))
    assert notices.is_due(0), "it was forgotten"
    assert not notices.is_due(9_999)
