"""An agent whose rounds are announced in pages, and whose blobs lie at mirrors: the same updates as ever."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np

from edgefl.wire.blobs import describe
from edgefl.wire.limits import Limits
from edgefl.wire.mqtt.messages import Round
from edgefl_device.personal.readonly_client import ReadOnlyClient
from tests.conftest import BrokerProcess
from tests.device_runtime import tiny
from tests.device_runtime.agent.agents import StartAgent
from tests.device_runtime.agent.link import publish_blob
from tests.device_runtime.agent.scripted import ScriptedServer, weights_of
from tests.device_runtime.tiny import World
from tests.mirror.hostile import ScriptedMirror, Talk


def paged(server: ScriptedServer, whole: Round, *, published: bool = True) -> Round:
    """The head of ``whole``; its page is at the broker unless it is not ``published``."""
    ref = describe(whole.page, tiny.CHUNK)
    if published:
        publish_blob(server.session, server.topics, whole.page, tiny.CHUNK)
    return whole.paged(ref)


def test_a_round_in_pages_is_trained_alike(server: ScriptedServer, start: StartAgent, world: World) -> None:
    start()
    server.open(world)
    plain = server.update()
    server.ack(plain)
    whole = world.announcement(number=2)
    server.announce(paged(server, whole))
    server.assign(world.task(number=2))
    update = server.update(2)
    server.ack(update)
    server.announce(paged(server, msgspec.structs.replace(whole, state="closed")))
    server.announce(paged(server, world.announcement(number=3)))
    server.assign(world.task(number=3))
    server.update(3)

    assert update.round == 2
    for name, array in weights_of(plain).items():
        assert array.shape == weights_of(update)[name].shape and np.isfinite(weights_of(update)[name]).all()


def test_a_missing_page_is_asked_for_again(server: ScriptedServer, start: StartAgent, world: World) -> None:
    start()
    server.hello()
    server.publish_blobs(world)
    whole = world.announcement()
    server.announce(paged(server, whole, published=False))
    server.assign(world.task())
    failed = server.failed()
    assert (failed.round, failed.tier) == (1, "weak") and "no good chunk" in failed.stage
    publish_blob(server.session, server.topics, whole.page, tiny.CHUNK)
    assert server.update().round == 1


def test_a_page_that_is_no_page_or_too_large_starts_nothing(
    server: ScriptedServer, start: StartAgent, world: World, limits: Limits
) -> None:
    agent = start(limits=msgspec.structs.replace(limits, max_manifest_bytes=16_000))
    server.hello()
    server.publish_blobs(world)
    junk, huge = b"\xc1junk", describe(bytes(16_001), tiny.CHUNK)
    ref = publish_blob(server.session, server.topics, junk, tiny.CHUNK)
    server.announce(world.announcement().paged(ref))
    server.assign(world.task())
    assert server.failed().stage == "failed: bundle"
    assert "malformed" in agent.event("failed").text
    server.announce(world.announcement().paged(huge))
    while "more than this device reads" not in agent.event("failed").text:
        pass
    server.announce(world.announcement())
    assert server.update().round == 1
    assert agent.alive


def test_one_without_a_task_reads_no_page(server: ScriptedServer, start: StartAgent, world: World) -> None:
    agent = start()
    server.hello()
    server.announce(paged(server, world.announcement(), published=False))
    server.announce(msgspec.structs.replace(world.announcement(), state="done"))
    agent.event("done")
    assert agent.agent.fetcher.fetches == 0


def test_all_of_a_round_comes_by_a_mirror(server: ScriptedServer, start: StartAgent, world: World) -> None:
    whole = world.announcement()
    blobs = {describe(data, tiny.CHUNK).sha256: data for data in (*world.blobs.values(), whole.page)}

    def answer(talk: Talk) -> None:
        talk.good(blobs[talk.path[1:]])

    with ScriptedMirror(answer, kept=True) as mirror:
        start()
        server.hello()
        head = whole.paged(describe(whole.page, tiny.CHUNK))
        server.announce(msgspec.structs.replace(head, mirrors=(mirror.url,), mirrors_only=True))
        server.assign(world.task())
        profile = server.update().profile

    assert (profile.down_bytes, profile.down_wire_bytes) == (0, 0)
    assert profile.mirror_bytes == sum(len(blobs[talk.path[1:]]) for talk in mirror.asked)
    assert len({talk.path for talk in mirror.asked}) == len(mirror.asked) > 3


def test_a_guest_reads_pages_too(
    server: ScriptedServer,
    world: World,
    broker: BrokerProcess,
    federation: str,
    tmp_path: Path,
    limits: Limits,
) -> None:
    whole = world.announcement()
    head = paged(server, whole, published=False)
    with ScriptedMirror(lambda talk: talk.good(whole.page)) as mirror:
        server.announce(msgspec.structs.replace(head, mirrors=(mirror.url,)))
        with ReadOnlyClient(federation, "guest", broker.address, tmp_path / "guest", limits) as guest:
            found = guest.announced()

    assert msgspec.structs.replace(found, v=1, mirrors=()) == whole
    assert len(mirror.asked) == 1
