"""The agent fed garbage: it refuses, says why, and goes on."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from edgefl.errors import DataError
from edgefl.wire.mqtt import messages
from edgefl.wire.mqtt.messages import Status
from edgefl_device.link.presence import NoticeLimiter
from tests.conftest import on_each_broker
from tests.device_runtime import tiny
from tests.device_runtime.agent.agents import StartAgent
from tests.device_runtime.agent.scripted import ScriptedServer, write_data
from tests.device_runtime.tiny import World

# -- bad input -------------------------------------------------------------------------------------------------

GARBAGE = [
    b"\xc1",
    b"not msgpack",
    b"\x80",
    messages.encode(Status(online=True)),
    b"\x81\xa1v\x02",
    b"\x81\xa1x" + b"\x91" * 100_000 + b"\x01",
    b"\x81\xa5round\xa1\xff",
    b"\x00" * 100_000,
]


def test_garbage_on_every_topic_is_refused(server: ScriptedServer, start: StartAgent, world: World) -> None:
    agent = start()
    agent.agent.refusals = NoticeLimiter(0.0)  # each is told
    server.hello()
    for garbage in GARBAGE:
        for topic in (server.topics.current_round, server.mine.tasks, server.mine.acks):
            server.publish(topic, garbage)
            assert f"ignored a message on {topic}" in agent.event("refused").text, garbage[:12]

    server.open(world)

    assert server.update().nonce == "n1"


def test_an_empty_message_is_no_message(server: ScriptedServer, start: StartAgent, world: World) -> None:
    agent = start()
    server.hello()
    for topic in (server.topics.current_round, server.mine.tasks, server.mine.acks):
        server.publish(topic, b"", retain=True)
    server.open(world)

    assert server.update().nonce == "n1"
    assert agent.event("refused", "round").event == "round"


def test_a_damaged_chunk_fails_the_attempt(server: ScriptedServer, start: StartAgent, world: World) -> None:
    agent = start()
    server.hello()
    damaged = server.topics.blob_chunk(world.unit_refs["mid"][0].sha256, 0)
    server.publish_blobs(world)
    server.publish(damaged, b"damaged", retain=True)
    server.announce(world.announcement())
    server.assign(world.task())
    assert "wrong digest" in agent.event("failed").text
    server.failed()
    server.failed()

    server.publish_blobs(world)

    assert server.update().nonce == "n1"
    assert agent.event("failed", "round").event == "round", "one reason is said once, however often it tries"


def test_a_bundle_for_another_engine_fails_the_attempt(server: ScriptedServer, start: StartAgent) -> None:
    bundle = tiny.make_bundle()
    graphs = tuple(msgspec.structs.replace(graph, format="executorch") for graph in bundle.manifest.graphs)
    world = World(tiny.BundleArchive(msgspec.structs.replace(bundle.manifest, graphs=graphs), bundle.blobs))
    agent = start()

    server.open(world)

    assert "holds ['executorch'] graphs, this device runs onnx" in agent.event("failed").text
    assert agent.alive


def test_wrong_weights_fail_the_attempt_only(server: ScriptedServer, start: StartAgent, world: World) -> None:
    wrong = World(tiny.make_bundle(), tiny.weights() | {"head": {"head.w": np.zeros((5, 1), np.float32)}})
    agent = start()
    server.open(wrong)
    assert "should be float32 (3, 1), found float32 (5, 1)" in agent.event("failed").text

    server.open(world, number=2)

    assert server.update(2).nonce == "n2"


def test_data_that_do_not_fit_are_declined(server: ScriptedServer, start: StartAgent, world: World) -> None:
    bundle = tiny.make_bundle()
    wide = msgspec.structs.replace(bundle.manifest.data, shape=(9,))
    other = World(tiny.BundleArchive(msgspec.structs.replace(bundle.manifest, data=wide), bundle.blobs))
    agent = start()

    server.open(other)

    assert "the model takes (9,)" in agent.event("data").text
    assert server.decline().reason == "wrong-data"
    server.open(world, number=2)
    assert server.update(2).nonce == "n2"


def test_unreadable_data_are_refused_before_publishing(start: StartAgent, tmp_path: Path) -> None:
    with pytest.raises(DataError):
        start(data=tmp_path / "nowhere.npz")


@on_each_broker
def test_a_stopped_agent_is_seen_offline(server: ScriptedServer, start: StartAgent, tmp_path: Path) -> None:
    agent = start(data=write_data(tmp_path, 5))
    assert server.status().online

    agent.stop()

    assert not server.status(lambda status: not status.online).online
