"""A device without tasks stops listening to rounds, and hears of what concerns it all the same."""

from __future__ import annotations

import time

import msgspec

from edgefl.wire.mqtt.messages import Task
from tests.device_runtime.agent.agents import StartAgent
from tests.device_runtime.agent.scripted import RunningAgent, ScriptedServer
from tests.device_runtime.tiny import World
from tests.wire.mqtt.events import PATIENCE_S


def rests(agent: RunningAgent) -> bool:
    """Whether it has stopped listening, or does so soon."""
    deadline = time.monotonic() + PATIENCE_S
    while not agent.agent._listening._resting and time.monotonic() < deadline:
        time.sleep(0.01)
    return agent.agent._listening._resting


def announce(server: ScriptedServer, world: World, *numbers: int) -> None:
    for number in numbers:
        server.announce(world.announcement(number=number, base=number - 1))


def heard(agent: RunningAgent) -> int:
    announced = agent.agent._rounds.announced
    return announced.round if announced is not None else 0


def test_a_device_that_rests_takes_the_next_task_and_hears_of_the_end(
    server: ScriptedServer, start: StartAgent, world: World
) -> None:
    agent = start(until_done=True)
    server.hello()
    server.publish_blobs(world)
    announce(server, world, 1, 2, 3)
    assert rests(agent) and heard(agent) == 3

    announce(server, world, 4, 5)
    server.assign(world.task(number=5))
    server.ack(server.update(5))
    assert agent.event("accepted").details["round"] == 5
    assert heard(agent) == 5 and not agent.agent._listening._resting

    announce(server, world, 6, 7, 8)
    assert rests(agent)
    server.announce(msgspec.structs.replace(world.announcement(number=9, base=8), state="done"))
    server.assign(Task(run="run", round=9, tier="weak", seed=0, nonce=""))
    assert agent.ended() is None


def test_a_device_with_a_task_in_every_round_listens_on(
    server: ScriptedServer, start: StartAgent, world: World
) -> None:
    agent = start()
    for number in range(1, 6):
        server.open(world, number=number, base=number - 1)
        server.ack(server.update(number))
        agent.event("accepted")
    assert not agent.agent._listening._resting
