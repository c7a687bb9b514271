"""Devices that fill the broker's memory, against a fleet on a Mosquitto with TLS and an access list."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from msgspec import structs

from edgefl.wire.limits import Limits
from edgefl.wire.mqtt.events import IncomingMessage, Refusal
from edgefl.wire.mqtt.messages import Task, UpdateChunk, encode
from edgefl.wire.mqtt.session import Session
from edgefl_server.events import Rejected, RoundClosed
from tests.conftest import SessionFactory
from tests.e2e.hostile.stage import DEVICES, EVERYTHING, TOPICS, Stage, Tap, secured
from tests.wire.mqtt.events import wait_for, wait_message, wait_up

COUNT = 50
CHUNK = UpdateChunk(nonce="0" * 24, sha256="0" * 64, index=0, count=2, size=2000, data=bytes(1000))


def test_retained_messages_are_erased(tmp_path: Path, limits: Limits, connect: SessionFactory) -> None:
    with secured(tmp_path, *DEVICES) as broker, ExitStack() as stack:
        fleet = Stage(broker, tmp_path, limits, stack, min_reports=1)
        opened, tasks = fleet.opened()
        mine, honest = TOPICS.device("strong-1"), TOPICS.device("strong-0")
        _blame(connect(broker.user(EVERYTHING)), fleet, tasks[0])
        attacker = connect(broker.user("strong-1"))
        wait_up(attacker)
        for number in range(COUNT):
            topic = mine.update(9, number)
            attacker.publish(topic, fleet.speakers["strong-1"].seal(topic, CHUNK), retain=True)

        refused = fleet.server.wait_for(Rejected, lambda event: event.reason == "retained")
        assert (refused.device, refused.round) == ("strong-1", 1)
        fleet.devices[0].report(tasks[0], opened)
        assert fleet.server.wait_for(RoundClosed).reports == 1
        left = COUNT
        while left:
            looker = connect(broker.user(EVERYTHING))
            looker.subscribe([f"{TOPICS.root}/devices/+/updates/+/+"])
            looker.subscribe([honest.status])  # answered after the first one
            left = 0
            while (event := wait_for(looker, IncomingMessage)).topic != honest.status:
                left += event.retained


def _blame(anybody: Session, fleet: Stage, task: Task) -> None:
    """Leave on the topics of an honest device what is not its own word, and copies of what is."""
    wait_up(anybody)
    tap = Tap(anybody)
    tap.until(bool, "what the server retains")
    honest, sealed = TOPICS.device("strong-0"), fleet.speakers["strong-0"].seal
    topic = honest.update(task.round, 0)
    said = sealed(topic, structs.replace(CHUNK, nonce=task.nonce))
    fleet.devices[0].session.publish(topic, said)
    tap.until(lambda heard: any(each.payload == said for each in heard), "the device's piece")
    anybody.publish(topic, said, retain=True)
    anybody.publish(honest.update(9, 0), b"x", retain=True)
    anybody.publish(honest.update(9, 1), encode(CHUNK), retain=True)
    anybody.publish(honest.update(9, 2), said, retain=True)
    foreign = honest.update(9, 3)
    anybody.publish(foreign, fleet.speakers["strong-1"].seal(foreign, CHUNK), retain=True)
    past = honest.update(0, 0)
    anybody.publish(past, sealed(past, CHUNK), retain=True)


def test_a_packet_above_the_limit_ends_at_the_broker(tmp_path: Path, connect: SessionFactory) -> None:
    with secured(tmp_path, *DEVICES) as broker:
        session = connect(broker.user(EVERYTHING))
        wait_up(session)
        session.subscribe(["edgefl/#"])
        session.publish(TOPICS.current_round, bytes(Limits().chunk_bytes))
        assert len(wait_message(session, TOPICS.current_round)) == Limits().chunk_bytes
        session.publish(TOPICS.current_round, bytes(5 * Limits().chunk_bytes))
        assert "max_packet_size" in wait_for(session, Refusal).limit
