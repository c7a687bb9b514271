"""The publisher against a list of what was published: order, once each, and clearing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgefl.wire import tensors
from edgefl.wire.blobs import describe
from edgefl.wire.mqtt.envelope import peek
from edgefl.wire.mqtt.messages import Round
from edgefl.wire.mqtt.topics import Topics
from edgefl_server.publish.model import unit_blobs, version_of
from edgefl_server.publish.publisher import AnnouncementMonitor, Publisher
from tests.support.errors import ConfigError, refuses
from tests.support.listeners import CallingListener
from tests.wire.mqtt.rounds import announcement
from tests.wire.mqtt.speakers import speaker_in

TOPICS = Topics("demo")


class Word:
    """The broker's on a message, which comes unless it has fallen silent by then."""

    def __init__(self, broker: Broker, payload: bytes) -> None:
        self._broker, self._clears = broker, not payload

    def wait(self, timeout_s: float) -> bool:
        return not (self._clears and self._broker.silent)

    def done(self) -> bool:
        return not self._broker.slow


class Broker:
    """Keeps retained messages as a broker does, and the order of everything. ``silent``: about those that clear; ``slow``:
    it has not taken what was published yet."""

    def __init__(self) -> None:
        self.silent = self.slow = False
        self.log: list[tuple[str, bytes]] = []
        self.kept: dict[str, bytes] = {}

    def publish(self, topic: str, payload: bytes, *, qos: int = 1, retain: bool = False) -> Any:
        assert retain and qos == 1
        self.log.append((topic, payload))
        if payload:
            self.kept[topic] = payload
        else:
            self.kept.pop(topic, None)
        return Word(self, payload)

    def forget(self) -> None:
        self.kept.clear()


def connected() -> tuple[Broker, Publisher]:
    broker = Broker()
    publisher = Publisher(broker, TOPICS, 4)
    publisher.connected()
    return broker, publisher


def test_a_blob_is_published_once_in_chunks() -> None:
    broker, publisher = connected()
    ref = publisher.offer(b"0123456789")
    assert publisher.offer(b"0123456789") == ref == describe(b"0123456789", 4)
    assert broker.log == [
        (TOPICS.blob_chunk(ref.sha256, n), p) for n, p in enumerate([b"0123", b"4567", b"89"])
    ]


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_a_blob_that_devices_would_refuse_is_refused_here(compression: Any) -> None:
    publisher = Publisher(Broker(), TOPICS, 4, compression, blob_limit=1000)
    assert publisher.offer(bytes(1000)).sha256 in publisher.live
    with refuses(ConfigError, size=1001, limit=1000):
        publisher.offer(bytes(1001))
    assert len(publisher.live) == 1


def test_a_graph_keeps_the_chunk_size_of_its_manifest() -> None:
    broker, publisher = connected()
    ref = publisher.offer(b"0123456789", 8)
    assert ref.count == 2 == len(broker.log)


def test_blobs_offered_offline_precede_the_announcement() -> None:
    broker = Broker()
    publisher = Publisher(broker, TOPICS, 4)
    ref = publisher.offer(b"01")
    publisher.announce(announcement(1))
    assert broker.log == []
    publisher.connected()
    assert [topic for topic, _ in broker.log] == [TOPICS.blob_chunk(ref.sha256, 0), TOPICS.current_round]


def test_a_broker_that_still_has_the_announcement_gets_only_what_is_new() -> None:
    broker, publisher = connected()
    publisher.offer(b"0123456789")
    publisher.announce(announcement(1))
    publisher.disconnected()
    new = publisher.offer(b"new")
    publisher.announce(announcement(2))
    retained = broker.kept[TOPICS.current_round]
    broker.log.clear()

    publisher.connected(resumed=True)
    assert (publisher.asking, broker.log) == (True, [])
    publisher.check_retained(retained)

    assert [topic for topic, _ in broker.log] == [TOPICS.blob_chunk(new.sha256, 0), TOPICS.current_round]
    broker.log.clear()
    publisher.check_retained(b"of somebody else, later")
    assert broker.log == []


@pytest.mark.parametrize("retained", [None, b"", b"an older one"])
def test_a_broker_that_lost_its_messages_gets_all_again(retained: bytes | None) -> None:
    """In a new session, or in one whose announcement is another."""
    broker, publisher = connected()
    publisher.offer(b"0123456789")
    publisher.announce(announcement(1))
    kept = dict(broker.kept)
    publisher.disconnected()
    broker.forget()
    broker.log.clear()
    publisher.connected(resumed=retained is not None)
    if retained is not None:
        publisher.check_retained(retained)
    assert broker.kept == kept
    assert broker.log[-1][0] == TOPICS.current_round and peek(Round, broker.log[-1][1]) == announcement(1)


def test_old_blobs_are_cleared_and_live_ones_kept() -> None:
    broker, publisher = connected()
    old, new = publisher.offer(b"old weights"), publisher.offer(b"new")
    publisher.announce(announcement(2))
    publisher.keep_only([new.sha256])
    assert set(broker.kept) == {TOPICS.blob_chunk(new.sha256, 0), TOPICS.current_round}
    assert set(publisher.live) == {new.sha256}
    publisher.clear(new)
    assert TOPICS.blob_chunk(new.sha256, 0) in broker.kept, "a live blob must not be cleared"
    assert publisher.offer(b"old weights") == old
    assert TOPICS.blob_chunk(old.sha256, 2) in broker.kept


def test_a_server_that_ends_waits_until_old_blobs_are_cleared_too() -> None:
    broker, publisher = connected()
    publisher.offer(b"old weights")
    publisher.announce(announcement(2))
    assert publisher.wait_delivered(0)
    publisher.keep_only([])
    broker.silent = True
    assert not publisher.wait_delivered(0)
    broker.silent = False
    assert publisher.wait_delivered(0)


def test_clearing_waits_for_the_broker() -> None:
    broker, publisher = connected()
    ref = publisher.offer(b"old weights")
    publisher.disconnected()
    publisher.keep_only([])
    assert len(broker.kept) == ref.count
    publisher.connected()
    assert broker.kept == {}


def test_units_become_blobs_and_a_version() -> None:
    weights = {"stem.w": np.ones(2, np.float32), "stem2.w": np.zeros(3, np.float32)}
    blobs = dict(unit_blobs(weights, ["stem", "pool", "stem2"]))
    assert {unit: set(tensors.load(data)) for unit, data in blobs.items()} == {
        "stem": {"stem.w"},
        "stem2": {"stem2.w"},
    }
    one, other = version_of([("a", b"1"), ("b", b"2")]), version_of([("b", b"2"), ("a", b"1")])
    assert one == other != version_of([("a", b"2"), ("b", b"1")])


def test_blobs_are_not_restored_again_before_the_last_time_is_over() -> None:
    broker = Broker()
    publisher = Publisher(broker, TOPICS, 4)
    publisher.connected()
    ref = publisher.offer(b"0123456789")
    once = len(broker.log)
    broker.slow = True
    for _ in range(5):
        publisher.restore_blobs()
    assert len(broker.log) == once + ref.count
    broker.slow = False
    publisher.restore_blobs()
    assert len(broker.log) == once + 2 * ref.count


def test_a_message_in_flight_is_not_the_retained_one(tmp_path: Path) -> None:
    broker, speaker = Broker(), speaker_in(tmp_path / "key")
    publisher = Publisher(broker, TOPICS, 4, seal=speaker.seal)
    watch = AnnouncementMonitor(publisher, speaker.keys.public, CallingListener(lambda _: None))
    watch.connected(resumed=False)
    publisher.offer(b"0123456789")
    publisher.announce(announcement(1))
    old = broker.kept[TOPICS.current_round]
    publisher.announce(announcement(2))
    watch.disconnected()
    said = len(broker.log)

    watch.connected(resumed=True)
    watch.receive(old)
    assert publisher.asking and len(broker.log) == said
    watch.receive(broker.kept[TOPICS.current_round], retained=True)
    assert publisher.online and len(broker.log) == said
