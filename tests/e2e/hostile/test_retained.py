"""Devices that fill the broker's memory, against a fleet on a Mosquitto with TLS and an access list."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from edgefl.wire.limits import Limits
from edgefl.wire.mqtt.session import Incoming, Refused
from server.events import Rejected, RoundClosed
from tests.conftest import SessionFactory
from tests.e2e.hostile.stage import DEVICES, EVERYTHING, TOPICS, Stage, secured
from tests.wire.mqtt.events import wait_for, wait_message, wait_up

COUNT = 50


def test_a_device_that_leaves_retained_messages_is_refused_and_they_are_erased(
    tmp_path: Path, limits: Limits, connect: SessionFactory
) -> None:
    with secured(tmp_path, *DEVICES) as broker, ExitStack() as stack:
        fleet = Stage(broker, tmp_path, limits, stack, min_reports=1)
        opened, tasks = fleet.opened()
        attacker = connect(broker.user("strong-1"))
        wait_up(attacker)
        mine = TOPICS.device("strong-1")
        for number in range(COUNT):
            attacker.publish(mine.update(9, number), bytes(1000), retain=True)

        refused = fleet.server.wait_for(Rejected, lambda event: event.reason == "retained")
        assert (refused.device, refused.round) == ("strong-1", 1)
        fleet.devices[0].report(tasks[0], opened)
        assert fleet.server.wait_for(RoundClosed).reports == 1
        left = COUNT
        while left:
            looker = connect(broker.user(EVERYTHING))
            looker.subscribe([f"{TOPICS.root}/devices/+/updates/+/+"])
            looker.subscribe([mine.status])  # answered after the first one
            left = 0
            while (event := wait_for(looker, Incoming)).topic != mine.status:
                left += event.retained


def test_a_packet_above_the_largest_message_ends_at_the_broker(
    tmp_path: Path, connect: SessionFactory
) -> None:
    with secured(tmp_path, *DEVICES) as broker:
        session = connect(broker.user(EVERYTHING))
        wait_up(session)
        session.subscribe(["edgefl/#"])
        session.publish(TOPICS.current_round, bytes(Limits().chunk_bytes))
        assert len(wait_message(session, TOPICS.current_round)) == Limits().chunk_bytes
        session.publish(TOPICS.current_round, bytes(5 * Limits().chunk_bytes))
        assert "max_packet_size" in wait_for(session, Refused).limit
