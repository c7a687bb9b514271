"""Fetching blobs from a real broker: windowed, resumable, and never believing a chunk it has not checked."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from edgefl.wire import tensors
from edgefl.wire.blobs import BlobRef, describe
from edgefl.wire.limits import Limits
from edgefl.wire.mqtt.session import Session
from edgefl.wire.mqtt.topics import Topics
from edgefl.wire.patches import apply_patch, make_patch
from edgefl.wire.tensors import Arrays
from edgefl_device.engine.onnx import OnnxEngine
from edgefl_device.link.fetch import Fetcher
from edgefl_device.round.graph_loader import GraphLoader, RoundProfiler
from edgefl_device.store.database import Store
from tests.conftest import BrokerProcess, Mosquitto, SessionFactory, on_each_broker
from tests.device_runtime.agent.link import Inbox, Recorder, publish_blob
from tests.device_runtime.tiny import World, make_bundle
from tests.support.errors import BundleError, RoundAborted, RoundDeclined, StoreError, refuses

CHUNK = 1000
DATA = np.random.default_rng(0).bytes(20 * CHUNK - 1)
INDICES = list(range(20))


class Device:
    """A device's store and session; ``fetcher`` makes a new process on them."""

    def __init__(self, session: Session, topics: Topics, folder: Path, limits: Limits) -> None:
        self.session = session
        self.topics = topics
        self.limits = limits
        self.store = Store(folder, limit_bytes=1 << 20, history_rounds=5)
        self.hooks: list[Callable[[str, bytes], None]] = []
        self.inbox = Inbox(
            session, lambda topic, payload: [hook(topic, payload) for hook in self.hooks] and None
        )
        self.recorder = Recorder(session)

    def fetcher(self, cancelled: threading.Event | None = None) -> Fetcher:
        self.recorder = Recorder(self.session)
        made = Fetcher(self.recorder, self.topics, self.store, self.limits, cancelled=cancelled)
        self.inbox.serve(made)
        return made

    def limit_store(self, limit_bytes: int) -> None:
        self.store.close()
        self.store = Store(self.store.folder, limit_bytes=limit_bytes, history_rounds=5)

    def topic(self, ref: BlobRef, index: int) -> str:
        return self.topics.blob_chunk(ref.sha256, index)

    def arrived(self) -> list[int]:
        return [self.topics.parse_blob(topic)[1] for topic in self.inbox.chunks]

    def close(self) -> None:
        self.inbox.stop()
        self.store.close()


@pytest.fixture
def server(broker: BrokerProcess, connect: SessionFactory) -> Session:
    return connect(broker.address)


class FewMissing(threading.Event):
    """Is set once ten chunks of a blob are missing, or fewer."""

    def __init__(self, device: Device, ref: BlobRef) -> None:
        super().__init__()
        self._device, self._ref = device, ref

    def is_set(self) -> bool:
        return len(self._device.store.missing_chunks(self._ref)) <= 10


@pytest.fixture
def device(
    broker: BrokerProcess, connect: SessionFactory, federation: str, tmp_path: Path, limits: Limits
) -> Iterator[Device]:
    made = Device(connect(broker.address), Topics(federation), tmp_path, limits)
    yield made
    made.close()


@on_each_broker
def test_a_blob_arrives_whole(server: Session, device: Device) -> None:
    ref = publish_blob(server, device.topics, DATA, CHUNK)
    fetcher = device.fetcher()

    assert fetcher.get(ref) == DATA
    assert fetcher.received_bytes == len(DATA)
    assert sorted(device.arrived()) == INDICES


def test_what_is_in_the_store_is_not_fetched_again(server: Session, device: Device) -> None:
    ref = publish_blob(server, device.topics, DATA, CHUNK)
    device.fetcher().get(ref)
    again = device.fetcher()

    assert again.get(ref) == DATA
    assert (again.received_bytes, again.fetches, device.recorder.asked) == (0, 0, [])


def test_several_blobs_arrive_in_one_go_and_in_the_order_asked(server: Session, device: Device) -> None:
    pieces = [DATA[: 3 * CHUNK], b"small", b"", DATA[CHUNK:]]
    refs = [publish_blob(server, device.topics, piece, CHUNK) for piece in pieces]
    fetcher = device.fetcher()

    assert [*fetcher.get_all(refs)] == pieces
    assert fetcher.fetches == 1


def test_a_blob_that_is_asked_for_again_leaves_after_others(server: Session, device: Device) -> None:
    refs = [publish_blob(server, device.topics, bytes([tag]) * CHUNK, CHUNK) for tag in (1, 2, 3)]
    device.limit_store(2 * CHUNK)
    for ref in (refs[0], refs[1], refs[0], refs[2]):
        device.fetcher().get(ref)

    assert [device.store.missing_chunks(ref) for ref in refs] == [[], [0], []]


def test_chunks_that_came_together_are_judged_one_by_one(server: Session, device: Device) -> None:
    ref = publish_blob(server, device.topics, DATA, CHUNK)
    wrong, right = device.topic(ref, 0), device.topic(ref, 1)
    held = threading.Event()
    device.hooks.append(lambda *_: held.wait(60.0) and None)

    class Together(threading.Event):
        """Delivers all chunks when the fetch first asks whether it is cancelled."""

        def is_set(self) -> bool:
            if not held.is_set():
                for topic, payload in (
                    (wrong, b"wrong"),
                    (right, DATA[CHUNK : 2 * CHUNK]),
                    (right, b"wrong"),
                ):
                    fetcher.deliver(topic, payload)
                fetcher.poke()
                held.set()
            return False

    fetcher = device.fetcher(Together())

    assert fetcher.get(ref) == DATA
    assert device.recorder.asked.count(wrong) == 3, "at first, where it was wrong, and after the connection"
    assert device.recorder.asked.count(right) == 1


def test_no_more_chunks_than_the_window_are_asked_for_at_once(server: Session, device: Device) -> None:
    ref = publish_blob(server, device.topics, DATA, CHUNK)

    device.fetcher().get(ref)

    assert device.recorder.most <= device.limits.fetch_window
    assert Counter(device.recorder.asked) == Counter(device.topic(ref, index) for index in INDICES)
    assert device.recorder.standing == set()


def test_an_interrupted_fetch_goes_on_with_what_is_missing(server: Session, device: Device) -> None:
    ref = publish_blob(server, device.topics, DATA, CHUNK)
    with pytest.raises(RoundAborted):
        device.fetcher(FewMissing(device, ref)).get(ref)
    missing = device.store.missing_chunks(ref)
    again = device.fetcher()

    assert again.get(ref) == DATA
    assert 0 < len(missing) <= 10
    assert sorted(device.recorder.asked) == sorted(device.topic(ref, index) for index in missing)


def test_an_aborted_fetch_leaves_no_subscription(server: Session, device: Device) -> None:
    ref = publish_blob(server, device.topics, DATA, CHUNK)

    over = threading.Event()
    over.set()
    with pytest.raises(RoundAborted, match="while its blobs were fetched"):
        device.fetcher(over).get(ref)
    assert device.recorder.standing == set()


def test_a_damaged_chunk_is_fetched_again_and_then_refused(server: Session, device: Device) -> None:
    ref = publish_blob(server, device.topics, DATA, CHUNK)
    server.publish(device.topic(ref, 7), b"damaged", retain=True).wait(60.0)

    with refuses(BundleError, sha256=ref.sha256, index=7):
        device.fetcher().get(ref)

    assert device.arrived().count(7) == device.limits.fetch_retries
    assert 7 in device.store.missing_chunks(ref)


@on_each_broker
def test_a_chunk_that_was_damaged_and_published_again_is_taken(server: Session, device: Device) -> None:
    ref = publish_blob(server, device.topics, DATA, CHUNK)
    server.publish(device.topic(ref, 7), b"damaged", retain=True).wait(60.0)

    def mend(_topic: str, payload: bytes) -> None:
        if payload == b"damaged":
            publish_blob(server, device.topics, DATA, CHUNK)

    device.hooks.append(mend)

    assert device.fetcher().get(ref) == DATA


@on_each_broker
def test_a_cleared_chunk_is_taken_once_it_is_back(server: Session, device: Device) -> None:
    ref = publish_blob(server, device.topics, DATA, CHUNK)
    server.publish(device.topic(ref, 19), b"", retain=True).wait(60.0)
    fetcher = device.fetcher()
    device.hooks.append(
        lambda topic, _: (
            publish_blob(server, device.topics, DATA, CHUNK) and None
            if topic == device.topic(ref, 18)
            else None
        )
    )

    assert fetcher.get(ref) == DATA


def test_chunks_that_nobody_published_are_given_up(server: Session, device: Device) -> None:
    ref = publish_blob(server, device.topics, DATA, CHUNK)
    server.publish(device.topic(ref, 3), b"", retain=True).wait(60.0)
    device.limits = msgspec.structs.replace(device.limits, fetch_timeout_s=0.05)

    with refuses(BundleError, blob=..., chunk=3, attempts=4):
        device.fetcher().get(ref)
    assert device.store.missing_chunks(ref) == [3]


def test_messages_outside_the_window_do_not_hide_a_silence(server: Session, device: Device) -> None:
    ref = publish_blob(server, device.topics, DATA, CHUNK)
    server.publish(device.topic(ref, 3), b"", retain=True).wait(60.0)
    device.limits = msgspec.structs.replace(device.limits, fetch_timeout_s=0.1)
    fetcher = device.fetcher()
    started, stranger = time.monotonic(), device.topics.blob_chunk("cd" * 32, 0)

    class Babble(threading.Event):
        """Brings another message at each look."""

        def is_set(self) -> bool:
            fetcher.deliver(stranger, b"who asked?")
            time.sleep(0.01)
            return time.monotonic() - started > 60.0

    fetcher.cancelled = Babble()
    with refuses(BundleError, blob=..., chunk=3, attempts=4):
        fetcher.get(ref)


def test_an_empty_blob_needs_no_broker(device: Device) -> None:
    """Nobody could deliver it: a retained empty message clears the topic."""
    fetcher = device.fetcher()

    assert fetcher.get(describe(b"", CHUNK)) == b""
    assert device.recorder.asked == []


def test_a_blob_damaged_on_disk_is_fetched_again(server: Session, device: Device) -> None:
    ref = publish_blob(server, device.topics, DATA, CHUNK)
    device.fetcher().get(ref)
    device.store.put_chunk(ref, 5, b"rotten")

    assert device.fetcher().get(ref) == DATA


def test_a_blob_in_other_chunks_is_fetched_again(server: Session, device: Device) -> None:
    """The server was started again with another chunk size while the device had half of the blob."""
    old = publish_blob(server, device.topics, DATA, CHUNK)
    with pytest.raises(RoundAborted):
        device.fetcher(FewMissing(device, old)).get(old)
    new = publish_blob(server, device.topics, DATA, 2 * CHUNK)

    assert device.fetcher().get(new) == DATA


def test_a_blob_over_the_limit_is_refused_before_anything_is_asked_for(device: Device) -> None:
    ref = BlobRef(sha256="ab" * 32, size=1 << 40, chunk=1 << 40)

    with pytest.raises(BundleError, match="more than the limit"):
        device.fetcher().get(ref)
    assert device.recorder.asked == []


def test_a_line_that_fits_the_store_stays_whole(server: Session, device: Device) -> None:
    """The store is as large as the keyframe and its patches: none of them leaves for another."""
    rng = np.random.default_rng(0)
    wanted: Arrays = {"u.w": rng.normal(size=(20, 30)).astype(np.float32)}
    pieces = [tensors.dump(wanted)]
    for _ in range(2):
        goal = {"u.w": wanted["u.w"] + rng.normal(size=(20, 30)).astype(np.float32)}
        pieces.append(make_patch(wanted, goal, {"u.w"}) or b"")
        wanted = apply_patch(wanted, pieces[-1])
    old = publish_blob(server, device.topics, DATA[:CHUNK], CHUNK)
    line = tuple(publish_blob(server, device.topics, piece, CHUNK) for piece in pieces)
    device.limit_store(sum(ref.size for ref in line))
    device.fetcher().get(old)
    fetcher = device.fetcher()
    world = World(make_bundle())
    graphs = GraphLoader(OnnxEngine(), world.bundle.manifest, fetcher, RoundProfiler())

    found = graphs.fetch_weights(msgspec.structs.replace(world.job(), units={"u": line}), ["u"])

    assert found["u.w"].tobytes() == wanted["u.w"].tobytes()
    assert fetcher.fetches == 1 and all(device.store.missing_chunks(ref) == [] for ref in line)
    device.limit_store(sum(ref.size for ref in line) - 1)
    graphs = GraphLoader(OnnxEngine(), world.bundle.manifest, device.fetcher(), RoundProfiler())
    device.store.drop_blob(line[2])
    with pytest.raises(StoreError, match="this round needs"):
        graphs.fetch_weights(msgspec.structs.replace(world.job(), units={"u": line}), ["u"])
    assert device.store.missing_chunks(line[0]) == [], "the keyframe must not go for its own patch"


def test_chunks_of_other_blobs_are_ignored(server: Session, device: Device) -> None:
    ref = publish_blob(server, device.topics, DATA, CHUNK)
    fetcher = device.fetcher()
    fetcher.deliver(device.topics.blob_chunk("cd" * 32, 0), b"who asked?")
    fetcher.deliver("nonsense", b"who asked?")

    assert fetcher.get(ref) == DATA


def test_a_broker_restarted_in_the_middle_costs_at_most_a_window(
    own_mosquitto: Mosquitto, connect: SessionFactory, tmp_path: Path, limits: Limits
) -> None:
    server, topics = connect(own_mosquitto.address), Topics("demo")
    device = Device(connect(own_mosquitto.address), topics, tmp_path / "device", limits)
    ref = publish_blob(server, topics, DATA, CHUNK)
    restarted: list[int] = []

    def restart(_topic: str, _payload: bytes) -> None:
        if len(device.inbox.chunks) == 10 and not restarted:
            own_mosquitto.kill()
            restarted.append(len(device.store.missing_chunks(ref)))
            own_mosquitto.start()
            publish_blob(server, topics, DATA, CHUNK)

    device.hooks.append(restart)

    assert device.fetcher().get(ref) == DATA
    assert restarted
    assert len(device.inbox.chunks) <= len(INDICES) + limits.fetch_window
    device.close()


def test_a_blob_with_larger_chunks_than_the_device_reads_is_declined(device: Device) -> None:
    small = {"max_message_bytes": 1000, "chunk_bytes": 512, "announcement_bytes": 1000}
    device.limits = msgspec.structs.replace(device.limits, **small)
    with refuses(RoundDeclined, limit=1000, largest=1001, reason="large-chunks"):
        device.fetcher().get(describe(bytes(1001), 2000))
