"""What is too large for a message, or for the broker: pages of an announcement, and a folder that mirrors serve."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from edgefl.wire.blobs import BlobRef, describe
from edgefl.wire.limits import Limits
from edgefl.wire.mqtt.envelope import peek
from edgefl.wire.mqtt.messages import ELSEWHERE, Round, decode, encode
from edgefl.wire.mqtt.topics import Topics
from edgefl_server.publish.blob_store import MirrorFolder
from edgefl_server.publish.publisher import AnnouncementMonitor, Publisher
from tests.server.publish.test_publisher import TOPICS, Broker
from tests.support.errors import ConfigError, ProtocolError, StoreError, refuses
from tests.support.listeners import CallingListener
from tests.wire.mqtt.rounds import announcement

DATA = b"0123456789"


def large(number: int = 1, units: int = 50) -> Round:
    refs = {f"unit{n}": (describe(f"{number} {n}".encode(), 4),) for n in range(units)}
    return msgspec.structs.replace(announcement(number), units=refs)


def said(broker: Broker) -> Round:
    return peek(Round, broker.kept[TOPICS.current_round])


def page_of(broker: Broker, head: Round) -> bytes:
    assert head.pages is not None
    chunks = (broker.kept[TOPICS.blob_chunk(head.pages.sha256, n)] for n in range(head.pages.count))
    return b"".join(chunks)


def test_a_large_announcement_becomes_a_head_and_a_page() -> None:
    broker = Broker()
    publisher = Publisher(broker, TOPICS, 512, most_bytes=2000)
    publisher.connected()
    publisher.announce(large())

    head = said(broker)
    assert (head.v, head.offers, head.units) == (ELSEWHERE, {}, {})
    assert len(broker.kept[TOPICS.current_round]) < 1000 < len(encode(large()))
    whole = head.whole(page_of(broker, head))
    assert msgspec.structs.replace(whole, v=1) == large() == publisher.current
    assert broker.log[-1][0] == TOPICS.current_round


def test_one_that_fits_is_sent_as_ever() -> None:
    broker = Broker()
    size = len(encode(large()))
    publisher = Publisher(broker, TOPICS, 512, most_bytes=size)
    publisher.connected()
    publisher.announce(large())
    assert (broker.kept[TOPICS.current_round], publisher.pages) == (encode(large()), ())

    publisher.message_limit = size - 1
    publisher.announce(large())
    assert said(broker).pages is not None


def test_a_page_stays_as_long_as_its_announcement() -> None:
    broker = Broker()
    publisher = Publisher(broker, TOPICS, 512, most_bytes=2000)
    publisher.announce(large(1))
    publisher.connected()
    publisher.keep_only([])
    first = said(broker)
    assert page_of(broker, first)
    publisher.announce(large(2))
    publisher.keep_only([])
    assert page_of(broker, said(broker)) and set(publisher.live) == {ref.sha256 for ref in publisher.pages}
    assert len(broker.kept) == 1 + publisher.pages[0].count
    publisher.announce(announcement(3))
    publisher.keep_only([])
    assert set(broker.kept) == {TOPICS.current_round} and publisher.pages == ()


def test_a_head_that_is_too_large_still_is_refused() -> None:
    broker = Broker()
    publisher = Publisher(broker, TOPICS, 512)
    publisher.connected()
    publisher.message_limit = 200
    named = msgspec.structs.replace(large(), hyper={f"scalar{n}": 1.0 for n in range(50)})
    with refuses(ConfigError, size=..., limit=200, key="broker.profile"):
        publisher.announce(named)
    assert TOPICS.current_round not in broker.kept


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"v": 1}, "version 1 has no pages and no mirrors_only"),
        ({"units": {"a": []}}, "has its offers and units there, found some beside them"),
        ({"v": 2}, "version 2, this side speaks 1 and 3"),
        ({"pages": {"sha256": "x"}}, "malformed"),
        ({"mirrors": "https://x"}, "malformed"),
    ],
)
def test_a_head_that_says_two_things_is_refused(changes: dict[str, object], text: str) -> None:
    fields = msgspec.msgpack.decode(encode(large().paged(describe(b"page", 4))))
    with pytest.raises(ProtocolError, match=text):
        decode(Round, msgspec.msgpack.encode({**fields, **changes}))


@pytest.mark.parametrize("page", [b"", b"\xc1", b"\x80", msgspec.msgpack.encode({"offers": 1, "units": {}})])
def test_a_page_that_cannot_be_read_is_refused(page: bytes) -> None:
    with refuses(ProtocolError, round=1):
        large().paged(describe(page, 4)).whole(page)


# -- the folder ----------------------------------------------------------------------------------------------


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {"lock"}


def mirrored(folder: Path, *, by_broker: bool) -> tuple[Broker, Publisher]:
    broker = Broker()
    publisher = Publisher(broker, TOPICS, 4, store=MirrorFolder(folder), by_broker=by_broker, most_bytes=2000)
    publisher.connected()
    return broker, publisher


def test_what_is_published_lies_in_the_folder_too_as_long_as_it_is_live(tmp_path: Path) -> None:
    (tmp_path / "of people").write_bytes(b"")
    (tmp_path / ("ab" * 32)).write_bytes(b"of an earlier process")
    broker, publisher = mirrored(tmp_path, by_broker=True)
    old, new = publisher.offer(DATA), publisher.offer(b"new")
    assert (tmp_path / old.sha256).read_bytes() == DATA == publisher.encoded(old.sha256)
    assert broker.kept[TOPICS.blob_chunk(old.sha256, 2)] == b"89"
    publisher.announce(announcement(1))
    publisher.keep_only([new.sha256])
    assert files(tmp_path) == {new.sha256, "of people"}
    assert TOPICS.blob_chunk(old.sha256, 2) not in broker.kept


def test_where_the_broker_cannot_carry_it_no_chunk_goes_there(tmp_path: Path) -> None:
    broker, publisher = mirrored(tmp_path, by_broker=False)
    ref = publisher.offer(DATA)
    publisher.announce(large())
    publisher.disconnected()
    publisher.connected()
    publisher.restore_blobs()
    assert {topic for topic, _ in broker.log} == {TOPICS.current_round}
    assert files(tmp_path) == {ref.sha256, publisher.pages[0].sha256}
    publisher.keep_only([])
    publisher.clear(BlobRef(sha256="cd" * 32, size=1, chunk=4))
    assert broker.log[-1] == (TOPICS.blob_chunk("cd" * 32, 0), b""), "of a time when there was a broker"


def test_a_file_that_a_power_cut_left_half_is_written_anew(tmp_path: Path) -> None:
    ref = describe(DATA, 4)
    (tmp_path / ref.sha256).write_bytes(bytes(len(DATA)))
    _, publisher = mirrored(tmp_path, by_broker=False)
    publisher.offer(DATA)
    assert (tmp_path / ref.sha256).read_bytes() == DATA


def test_a_blob_that_somebody_deleted_is_told_once(tmp_path: Path) -> None:
    _, publisher = mirrored(tmp_path, by_broker=True)
    ref = publisher.offer(DATA)
    told: list[str] = []
    now = iter(range(0, 10_000, 100))
    listener = CallingListener(lambda event: told.append(str(event)))
    watch = AnnouncementMonitor(publisher, b"", listener, lambda: float(next(now)))
    watch.restore_missing()
    assert told == []
    (tmp_path / ref.sha256).unlink()
    watch.restore_missing()
    watch.restore_missing()
    assert len(told) == 1 and "is gone from the mirror's folder" in told[0]
    with refuses(StoreError, folder=str(tmp_path), sha256=...):
        publisher.encoded(ref.sha256)


def test_one_server_has_the_folder_and_says_where_it_cannot_write(tmp_path: Path) -> None:
    held = MirrorFolder(tmp_path / "one")
    with pytest.raises(StoreError, match=r"another server publishes into .* \(process"):
        MirrorFolder(tmp_path / "one")
    held.close()
    again = MirrorFolder(tmp_path / "one")
    os.rename(tmp_path / "one", tmp_path / "two")
    with refuses(StoreError, folder=str(tmp_path / "one"), error=...):
        again.keep("ab" * 32, DATA)
    (tmp_path / "file").write_bytes(b"")
    with refuses(StoreError, folder=str(tmp_path / "file"), error=...):
        MirrorFolder(tmp_path / "file")


class SlowBroker(Broker):
    """Takes what was published when somebody waits for it; ``most`` is what waited at once."""

    def __init__(self, *, dead: bool = False) -> None:
        super().__init__()
        self.dead, self.waiting, self.most, self.waits = dead, 0, 0, 0

    def publish(self, topic: str, payload: bytes, *, qos: int = 1, retain: bool = False) -> object:  # type: ignore[override]
        self.waiting += len(payload)
        self.most = max(self.most, self.waiting)
        broker = self

        class Word:
            def wait(self, timeout_s: float) -> bool:
                broker.waits += 1
                broker.waiting -= 0 if broker.dead else len(payload)
                return not broker.dead

            def done(self) -> bool:
                return False

        return Word()


@pytest.mark.parametrize("dead", [False, True])
def test_a_model_waits_in_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dead: bool) -> None:
    monkeypatch.setattr("edgefl_server.publish.publisher._MOST_WAITING", 3000)
    broker = SlowBroker(dead=dead)
    publisher = Publisher(broker, Topics("demo"), 1000, store=MirrorFolder(tmp_path))
    publisher.connected()
    publisher.offer(os.urandom(50_000))
    assert broker.most == (50_000 if dead else 3000)
    assert broker.waits == (1 if dead else 47), "one that takes nothing is not waited for again and again"


def test_the_limit_of_an_announcement_is_what_the_strictest_broker_takes() -> None:
    assert Limits().announcement_bytes == Limits().chunk_bytes == 128 * 1024
