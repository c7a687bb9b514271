"""When an agent says hello, and what it tells its server of the conditions that it is in."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from edgefl.wire.limits import Limits
from edgefl.wire.mqtt.messages import COME_LATER, Ack, Conditions, encode
from edgefl_device.link import greeting
from edgefl_device.policy import Policy
from tests.device_runtime.agent.agents import StartAgent
from tests.device_runtime.agent.scripted import ScriptedServer


def test_a_device_says_hello_again_when_its_conditions_change(
    server: ScriptedServer, start: StartAgent, tmp_path: Path, limits: Limits
) -> None:
    state = tmp_path / "state.txt"
    state.write_text("power = battery\nlink = metered\n")
    limits = msgspec.structs.replace(limits, conditions_s=0.05)
    start(limits=limits, policy=Policy(surroundings=("cat", str(state))))
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


def test_a_device_whose_owner_does_not_want_it_tells_nothing(
    server: ScriptedServer, start: StartAgent
) -> None:
    start(policy=Policy(tell=False))
    assert server.hello().conditions is msgspec.UNSET


def test_a_device_that_is_told_to_come_later_says_hello_again_then(
    server: ScriptedServer, start: StartAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(greeting, "SOONEST_S", 0.0)
    agent = start()
    server.hello()
    ack = Ack(round=0, nonce="", status="rejected", reason=COME_LATER, text="no room", later_s=0.05)
    server.publish(server.mine.acks, encode(ack))
    assert agent.event("refused").text == "no room"
    assert server.hello().again is msgspec.UNSET
