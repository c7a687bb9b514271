"""A device at work goes on while later rounds are announced, as long as its own takes updates."""

from __future__ import annotations

import msgspec

from edgefl.wire.mqtt.messages import Live, Round
from tests.device_runtime.agent.agents import StartAgent
from tests.device_runtime.agent.scripted import ScriptedServer
from tests.device_runtime.tiny import World


def later(world: World, *live: int, number: int = 2) -> Round:
    """Round ``number``, with earlier ones that take updates too."""
    announced = world.announcement(number=number)
    older = {each: Live(model_version=f"v{each}", units=world.unit_refs, hyper={}) for each in live}
    return msgspec.structs.replace(announced, live=older)


def test_it_goes_on_with_its_round_until_it_is_given_another_task(
    server: ScriptedServer, start: StartAgent, world: World, endless: World
) -> None:
    agent = start()
    server.open(endless)
    at = server.progress().step

    server.announce(later(endless, 1))
    at = server.progress(at + 1).step
    server.announce(later(endless, 1, 2, number=3))
    server.progress(at + 1)

    server.publish_blobs(world)
    server.announce(later(world, 1, 2, number=3))
    server.assign(world.task(number=3))
    assert agent.event("aborted").details["round"] == 1
    assert server.update(3).nonce == "n3"


def test_it_stops_when_its_round_is_closed(server: ScriptedServer, start: StartAgent, endless: World) -> None:
    agent = start()
    server.open(endless)
    server.progress()
    server.announce(later(endless, 2, number=3))
    assert agent.event("aborted").details["round"] == 1


def test_it_begins_a_round_before_the_newest(server: ScriptedServer, start: StartAgent, world: World) -> None:
    start()
    server.hello()
    server.publish_blobs(world)
    server.announce(later(world, 1, number=2))
    server.assign(world.task(number=1, nonce="n1"))
    first = server.update(1)
    assert (first.round, first.model_version) == (1, "v1")
    server.ack(first)
    server.assign(world.task(number=1, nonce="again"))  # a task more, of the same round
    assert server.update(1).nonce == "again"
