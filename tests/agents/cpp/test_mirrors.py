"""A C++ agent gets the blobs of a round from mirrors, and believes them nothing."""

from __future__ import annotations

import msgspec

from edgefl.wire.mqtt.messages import Round
from edgefl_conformance.cases.elsewhere import mirrored
from tests.agents.cpp.conftest import StartAgent
from tests.device_runtime import tiny
from tests.device_runtime.agent.scripted import ScriptedServer
from tests.device_runtime.tiny import World

SOON = ("--limit", "mirror_pause_s=0.1", "--limit", "retry_pause_s=0.1")


def announced(world: World, *mirrors: str, only: bool = True) -> Round:
    return msgspec.structs.replace(
        world.announcement(), v=3 if only else 1, mirrors=mirrors, mirrors_only=only
    )


def test_blobs_that_are_at_mirrors_only_are_fetched_and_counted(
    server: ScriptedServer, start: StartAgent
) -> None:
    """The first has nothing, the second lies, the third has the rest."""
    world = World(tiny.make_bundle())
    wrong = {name: bytes(len(blob)) for name, blob in world.blobs.items()}
    agent = start(*SOON)
    server.hello()
    with mirrored({}) as empty, mirrored(wrong) as lying, mirrored(world.blobs) as good:
        server.announce(announced(world, empty.url, lying.url, good.url))
        server.assign(world.task())
        update = server.update()
        told = agent.event("mirror")["text"]
        server.ack(update)
        agent.event("accepted")

    assert f"mirror {lying.url} is left for" in told
    assert "a chunk has a wrong digest" in told
    assert update.profile.mirror_bytes >= sum(map(len, world.blobs.values())) - tiny.CHUNK
    assert update.profile.down_bytes == 0
    assert set(good.asked) <= set(world.blobs)
    assert agent.stop() == 0


def test_an_own_mirror_is_asked_first(server: ScriptedServer, start: StartAgent) -> None:
    world = World(tiny.make_bundle())
    with mirrored({}) as named, mirrored({}) as own:
        agent = start("--mirror", own.url, *SOON)
        server.hello()
        server.announce(announced(world, "http://198.51.100.1:80", named.url))
        server.assign(world.task())
        told = agent.event("mirror")["text"]
        failed = agent.event("failed")["text"]
        asked = bool(own.asked)

    assert "mirror http://198.51.100.1:80 is left for" in told
    assert "without TLS only a machine of a private network is asked" in told
    assert "no mirror gave all blobs of the round, and the broker has none" in failed
    assert asked
    assert agent.stop() == 0
