"""Retained messages on topics that no worker subscribes to."""

from __future__ import annotations

from edgefl.wire.mqtt.events import IncomingMessage
from edgefl.wire.mqtt.topics import Topics
from edgefl_server.updates.retained import RetainedMessageCleaner
from tests.conftest import Mosquitto, SessionFactory
from tests.server.fleet import PATIENCE_S
from tests.wire.mqtt.events import wait_for, wait_until, wait_up


def test_idle_shards_are_erased(mosquitto: Mosquitto, connect: SessionFactory, federation: str) -> None:
    topics = Topics(federation)
    attacker, server = connect(mosquitto.address), connect(mosquitto.address)
    wait_up(attacker)
    wait_up(server)
    left = [f"{topics.root}/devices/strong-0/shards/{name}/1/2" for name in ("64", "-1", "nowhere")]
    for topic in left:
        attacker.publish(topic, b"left", retain=True).wait(PATIENCE_S)
    leftovers = RetainedMessageCleaner(server, topics)
    leftovers.step(shards=False)
    erased = set[str]()
    while erased != set(left):
        message = wait_for(server, IncomingMessage, lambda event: event.payload != b"")
        assert leftovers.erase(message) and leftovers.is_for_worker(message)
        erased.add(message.topic)
    wait_until(lambda: leftovers.step(shards=False) > 0.1, "the end of the look at all shards")

    wait_until(lambda: not server._leaving, "the broker's answer")
    assert not leftovers.erase(IncomingMessage(left[0], b"", retained=True)), "it would come back without end"
    live = [left[0], topics.device("strong-0").update(1, 2)]
    for topic in live:
        attacker.publish(topic, b"live").wait(PATIENCE_S)
    assert wait_for(server, IncomingMessage, lambda event: event.payload == b"live").topic == live[1]
