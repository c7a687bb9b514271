"""Fetching by mirrors: a good one saves the broker, and whatever a bad one does, the blob arrives from somewhere else."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from edgefl.wire.blobs import BlobRef, describe
from edgefl.wire.limits import Limits
from edgefl.wire.mirrors import Mirror
from edgefl.wire.mqtt.messages import ELSEWHERE, Round
from edgefl.wire.mqtt.session import Session
from edgefl.wire.mqtt.topics import Topics
from edgefl_device.link.fetch import Fetcher
from edgefl_device.link.mirrors import Mirrors
from edgefl_device.store.database import Store
from tests.conftest import BrokerProcess, SessionFactory
from tests.device_runtime.agent.link import Inbox, publish_blob
from tests.mirror.bad import BAD, CHUNK, DATA, endless, ends_early, hangs_up, head, status, wrong
from tests.mirror.hostile import Behaviour, ScriptedMirror, Talk
from tests.support.device_logs import RecordedLog
from tests.support.errors import BundleError, RoundAborted, RoundDeclined, refuses
from tests.wire.mqtt.rounds import announcement

REF = describe(DATA, CHUNK)


class Device:
    """A device with a store, a session and mirrors; ``told`` is what it says of them."""

    def __init__(self, session: Session, federation: str, folder: Path, limits: Limits) -> None:
        self.session, self.topics, self.limits = session, Topics(federation), limits
        self.store = Store(folder, limit_bytes=1 << 20, history_rounds=5)
        self.inbox = Inbox(session)
        self.log = RecordedLog()
        self.told = self.log.texts

    def fetcher(
        self,
        *named: str,
        own: tuple[str, ...] = (),
        only: bool = False,
        allowed: bool = True,
        cancelled: threading.Event | None = None,
    ) -> Fetcher:
        mirrors = Mirrors(self.limits, [Mirror.parse(url) for url in own], allowed=allowed, log=self.log)
        mirrors.use_announced(naming(*named, only=only))
        made = Fetcher(self.session, self.topics, self.store, self.limits, mirrors, cancelled)
        self.inbox.serve(made)
        return made

    def close(self) -> None:
        self.inbox.stop()
        self.store.close()


def naming(*urls: str, only: bool = False) -> Round:
    return msgspec.structs.replace(
        announcement(), mirrors=urls, mirrors_only=only, v=ELSEWHERE if only else 1
    )


@pytest.fixture
def device(
    broker: BrokerProcess, connect: SessionFactory, federation: str, tmp_path: Path, limits: Limits
) -> Iterator[Device]:
    made = Device(connect(broker.address), federation, tmp_path, limits)
    yield made
    made.close()


@pytest.fixture
def published(broker: BrokerProcess, connect: SessionFactory, device: Device) -> BlobRef:
    return publish_blob(connect(broker.address), device.topics, DATA, CHUNK)


def good(talk: Talk) -> None:
    talk.good(DATA)


def test_what_a_mirror_has_is_not_asked_of_the_broker(device: Device, published: BlobRef) -> None:
    with ScriptedMirror(good) as mirror:
        fetcher = device.fetcher(mirror.url + "/demo/")
        assert fetcher.get(REF) == DATA

    assert [talk.path for talk in mirror.asked] == [f"/demo/{REF.sha256}"]
    assert (fetcher.received_bytes, fetcher.fetches, device.inbox.chunks) == (0, 0, [])
    assert fetcher.mirrors.fresh_bytes == len(DATA)
    assert (fetcher.mirrors.take_received(), fetcher.mirrors.take_received()) == (len(DATA), 0)
    assert device.told == []


def test_a_connection_is_kept_for_the_next_blob(device: Device) -> None:
    pieces = {describe(part, CHUNK).sha256: part for part in (DATA, DATA[1:], DATA[2:], b"")}
    with ScriptedMirror(lambda talk: talk.good(pieces[talk.path[1:]]), kept=True) as mirror:
        fetcher = device.fetcher(mirror.url, only=True)
        assert [*fetcher.get_all([describe(part, CHUNK) for part in pieces.values()])] == [*pieces.values()]

    assert (mirror.connections, len(mirror.asked)) == (1, 3), "and nobody asks for no bytes"


def test_only_what_is_missing_is_asked_for(device: Device) -> None:
    device.store.make_room([REF])
    for index in (0, 1, 7, 19):
        device.store.put_chunk(REF, index, DATA[index * CHUNK : (index + 1) * CHUNK])
    with ScriptedMirror(good) as mirror:
        assert device.fetcher(mirror.url, only=True).get(REF) == DATA

    assert [talk.part for talk in mirror.asked] == [(2000, 7000), (8000, 19000)]


def test_a_mirror_that_knows_no_ranges_sends_the_whole(device: Device) -> None:
    device.store.make_room([REF])
    device.store.put_chunk(REF, 0, DATA[:CHUNK])

    def whole(talk: Talk) -> None:
        talk.send(f"HTTP/1.1 200 OK\r\nContent-Length: {len(DATA)}\r\n\r\n")
        talk.send(DATA)

    with ScriptedMirror(whole) as mirror:
        assert device.fetcher(mirror.url, only=True).get(REF) == DATA


# -- what a bad one may do -----------------------------------------------------------------------------------


@pytest.mark.sample(7)
@pytest.mark.parametrize(("behave", "reasons"), BAD.values(), ids=BAD)
def test_a_bad_mirror_leaves_it_to_the_broker(
    device: Device, published: BlobRef, behave: Behaviour, reasons: tuple[str, ...]
) -> None:
    with ScriptedMirror(behave) as mirror:
        fetcher = device.fetcher(mirror.url)
        assert fetcher.get(REF) == DATA
        assert fetcher.get(describe(b"", CHUNK)) == b""

    (told,) = device.told
    assert told.startswith(f"mirror {mirror.url} is left for 10 s: blob {REF.sha256[:12]}: ")
    assert any(reason in told for reason in reasons), told
    assert fetcher.received_bytes > 0
    assert len(mirror.asked) == 1


def test_a_mirror_that_sends_for_ever_is_read_as_far_as_the_blob_goes(device: Device) -> None:
    with ScriptedMirror(endless) as mirror:
        fetcher = device.fetcher(mirror.url, only=True)
        assert fetcher.get(REF) == DATA
        assert fetcher.mirrors.fresh_bytes == len(DATA)


def test_the_right_chunks_of_a_mirror_that_ends_early_stay(device: Device, published: BlobRef) -> None:
    with ScriptedMirror(ends_early) as mirror:
        fetcher = device.fetcher(mirror.url)
        assert fetcher.get(REF) == DATA

    assert len(device.inbox.chunks) == 18
    assert fetcher.mirrors.fresh_bytes == 2000


def test_a_mirror_that_failed_is_left_longer_each_time(device: Device, published: BlobRef) -> None:
    with ScriptedMirror(status(503)) as mirror:
        fetcher = device.fetcher(mirror.url)
        fetcher.get(REF)
        device.store.drop_blob(REF)
        fetcher.get(REF)
        assert len(mirror.asked) == 1
        record = fetcher.mirrors._records[Mirror.parse(mirror.url)]
        record.left_until = 0.0
        device.store.drop_blob(REF)
        fetcher.get(REF)

    assert (len(mirror.asked), record.faults) == (2, 2)
    assert len(device.told) == 1, "the same is told once"


def test_a_blob_that_one_mirror_lacks_comes_from_the_next(device: Device) -> None:
    other = describe(DATA[5:], CHUNK)

    def lacks(talk: Talk) -> None:
        (status(404) if talk.path[1:] == REF.sha256 else lambda each: each.good(DATA[5:]))(talk)

    with ScriptedMirror(lacks, kept=True) as first, ScriptedMirror(good) as second:
        fetcher = device.fetcher(first.url, second.url, only=True)
        assert [*fetcher.get_all([REF, other])] == [DATA, DATA[5:]]

    assert [talk.path[1:] for talk in second.asked] == [REF.sha256]
    assert device.told == []


def test_a_mirror_with_nothing_is_left(device: Device, published: BlobRef) -> None:
    blobs = [DATA[n:] for n in range(6)]
    for blob in blobs:
        publish_blob(device.session, device.topics, blob, CHUNK)
    with ScriptedMirror(status(404), kept=True) as mirror:
        fetcher = device.fetcher(mirror.url)
        assert [*fetcher.get_all([describe(blob, CHUNK) for blob in blobs])] == blobs

    assert len(mirror.asked) == 3 and "it lacks the blob (HTTP 404)" in device.told[0]


def test_a_slow_mirror_is_left_where_there_is_a_broker(device: Device, published: BlobRef) -> None:
    def slow(talk: Talk) -> None:
        talk.send(head())
        for start in range(0, len(DATA), CHUNK):
            talk.send(DATA[start : start + CHUNK])
            if talk.ended.wait(0.1):
                return

    with ScriptedMirror(slow) as mirror:
        assert device.fetcher(mirror.url).get(REF) == DATA
        assert "bytes/s over" in device.told[0] and 1 <= len(device.inbox.chunks) < 20
        device.store.drop_blob(REF)
        assert device.fetcher(mirror.url, only=True).get(REF) == DATA


def test_two_bad_mirrors_are_enough_for_one_time(device: Device, published: BlobRef) -> None:
    with ScriptedMirror(status(503)) as one, ScriptedMirror(hangs_up) as two, ScriptedMirror(good) as three:
        assert device.fetcher(one.url, two.url, three.url).get(REF) == DATA
        assert three.asked == []
        device.store.drop_blob(REF)
        assert device.fetcher(one.url, two.url, three.url, only=True).get(REF) == DATA
        assert len(three.asked) == 1


def test_a_mirror_of_the_devices_own_is_asked_first(device: Device) -> None:
    with ScriptedMirror(good) as own, ScriptedMirror(good) as named:
        assert device.fetcher(named.url, own=(own.url,)).get(REF) == DATA
        assert (len(own.asked), len(named.asked)) == (1, 0)


def test_a_blob_from_nowhere_names_the_reasons(device: Device) -> None:
    with ScriptedMirror(wrong) as mirror:
        fetcher = device.fetcher(mirror.url, only=True)
        with pytest.raises(BundleError, match=r"no good chunk: no mirror .*chunk 0 has a wrong digest"):
            fetcher.get(REF)

    assert (device.inbox.chunks, fetcher.fetches) == ([], 0)


def test_an_owner_may_allow_no_mirrors(device: Device, published: BlobRef) -> None:
    with ScriptedMirror(good) as mirror:
        assert device.fetcher(mirror.url, allowed=False).get(REF) == DATA
        device.store.drop_blob(REF)
        with refuses(RoundDeclined, reason="policy") as caught:
            device.fetcher(mirror.url, allowed=False, only=True).get(REF)

    assert (caught.value.reason, mirror.asked) == ("policy", [])


def test_a_round_that_is_over_ends_the_waiting_for_a_mirror(device: Device) -> None:
    over = threading.Event()

    def silent_until_over(talk: Talk) -> None:
        over.set()
        talk.ended.wait()

    device.limits = msgspec.structs.replace(device.limits, fetch_timeout_s=1e6)
    with ScriptedMirror(silent_until_over) as mirror:
        with pytest.raises(RoundAborted, match="while its blobs were fetched"):
            device.fetcher(mirror.url, cancelled=over).get(REF)
        assert device.told == []


def test_http_is_for_private_networks_unless_the_device_names_it(
    device: Device, published: BlobRef, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgefl.wire.mirror_client.is_near", lambda address: False)
    with ScriptedMirror(good) as mirror:
        assert device.fetcher(mirror.url).get(REF) == DATA
        assert mirror.asked == [] and "no machine of a private network" in device.told[0]
        device.store.drop_blob(REF)
        assert device.fetcher(own=(mirror.url,), only=True).get(REF) == DATA


def test_names_that_are_no_urls_are_told_and_passed_over(device: Device) -> None:
    with ScriptedMirror(good) as mirror:
        fetcher = device.fetcher("file:///etc", *["ftp://x"] * 3, mirror.url, *["https://beyond"] * 50)
        assert fetcher.get(REF) == DATA
        assert len(fetcher.mirrors._named) <= 8

    assert len(device.told) == 1 and "is no mirror" in device.told[0]


def test_a_server_that_names_no_mirrors_is_told_of_no_bytes_by_them(device: Device) -> None:
    with ScriptedMirror(good) as mirror:
        fetcher = device.fetcher(own=(mirror.url,))
        assert fetcher.get(REF) == DATA
        assert (fetcher.mirrors.fresh_bytes, fetcher.mirrors.take_received()) == (len(DATA), 0)
