"""The outbox against a real broker and a server that loses things: an update is sent until the server has spoken."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from edgefl.errors import StoreError
from edgefl.wire.limits import Limits
from edgefl.wire.mqtt import messages
from edgefl.wire.mqtt.address import Address
from edgefl.wire.mqtt.envelope import peek
from edgefl.wire.mqtt.events import IncomingMessage
from edgefl.wire.mqtt.messages import Ack, UpdateChunk
from edgefl.wire.mqtt.session import Session
from edgefl.wire.mqtt.topics import Topics
from edgefl_device.link.identity import SignedSession
from edgefl_device.link.outbox import Outbox
from edgefl_device.store.database import Outgoing, PastRound, Store
from tests.conftest import BrokerProcess, SessionFactory, on_each_broker
from tests.support.device_logs import RecordedLog
from tests.wire.mqtt.events import PATIENCE_S, wait_for, wait_up

DATA = bytes(range(256)) * 8


class Server:
    """Reads update chunks one by one and answers when told to."""

    def __init__(self, session: Session, topics: Topics, device: str) -> None:
        self.session = session
        self.topics = topics
        self.device = device
        self.digests: dict[str, str] = {}
        session.subscribe(topics.server_filters)
        wait_up(session)
        mine = topics.device(device)
        session.publish(mine.update(0, 0), b"", qos=1)
        wait_for(session, IncomingMessage)  # subscribed: our own message came back
        session.subscribe([mine.acks])

    def chunk(self) -> UpdateChunk:
        event = wait_for(self.session, IncomingMessage, lambda event: "/updates/" in event.topic)
        chunk = peek(UpdateChunk, event.payload)
        assert event.topic == self.topics.device(self.device).update(3, chunk.index)
        assert len(event.payload) <= 1024
        self.digests[chunk.nonce] = chunk.sha256
        return chunk

    def copy(self) -> list[UpdateChunk]:
        """All chunks of one sending."""
        first = self.chunk()
        return [first, *(self.chunk() for _ in range(first.count - 1))]

    def ack(self, nonce: str, status: str = "accepted", **fields: object) -> None:
        told = {"round": 3, "nonce": nonce, "status": status, "sha256": self.digests.get(nonce, ""), **fields}
        ack = msgspec.convert(told, Ack)
        assert self.session.publish(self.topics.device(self.device).acks, messages.encode(ack)).wait(
            PATIENCE_S
        )

    def silent(self) -> bool:
        """Whether no chunk came before a mark that we send ourselves."""
        self.session.publish(self.topics.device(self.device).update(0, 0), b"mark")
        event = wait_for(self.session, IncomingMessage, lambda event: "/updates/" in event.topic)
        return event.payload == b"mark"


class FaultyStore(Store):
    """Raises its ``faults`` where an update is settled, one each time, and notes the nonces of the others."""

    faults: list[Exception]

    def __init__(self, folder: Path, **options: int) -> None:
        super().__init__(folder, **options)  # type: ignore[arg-type]
        self.settled: list[str] = []

    def settle(self, past: PastRound) -> None:
        if self.faults:
            raise self.faults.pop()
        super().settle(past)
        self.settled.append(past.nonce)


class Device:
    """A device's store with an outbox on it; ``restart`` is a new process."""

    def __init__(self, session: Session, topics: Topics, folder: Path, limits: Limits) -> None:
        self.folder = folder
        self.topics = topics
        self.limits = limits
        self.log = RecordedLog()
        self.faults: list[Exception] = []
        self._open(session)

    def _open(self, session: Session) -> None:
        self.session = session
        self.store = FaultyStore(self.folder, limit_bytes=1 << 20, history_rounds=5)
        self.store.faults = self.faults
        self.outbox = Outbox(
            SignedSession(session), self.topics.device("phone"), self.store, self.limits, self.log
        )
        session.subscribe([self.topics.device("phone").acks])
        self.outbox.start()

    def add(self, nonce: str, data: bytes = DATA) -> None:
        self.store.finish_job(Outgoing("run", 3, nonce, data), None, "")
        self.outbox.wake()

    def hear(self) -> None:
        """Pass one acknowledgement on, as the agent does."""
        event = wait_for(self.session, IncomingMessage, lambda event: event.topic.endswith("/acks"))
        self.outbox.deliver(peek(Ack, event.payload))

    def verdict(self) -> tuple[str, str]:
        while (event := self.log.events.get(timeout=PATIENCE_S)).event not in ("accepted", "rejected"):
            assert event.event == "store"
        return self.store.settled.pop(0), event.event

    def close(self) -> None:
        self.outbox.stop()
        self.store.close()

    def restart(self, session: Session) -> None:
        self.close()
        self._open(session)


@pytest.fixture
def topics(federation: str) -> Topics:
    return Topics(federation)


@pytest.fixture
def device(
    broker: BrokerProcess, connect: SessionFactory, topics: Topics, tmp_path: Path, limits: Limits
) -> Iterator[Device]:
    session = connect(broker.address)
    wait_up(session)
    made = Device(session, topics, tmp_path, limits)
    yield made
    made.close()


@pytest.fixture
def server(broker: BrokerProcess, connect: SessionFactory, topics: Topics) -> Server:
    return Server(connect(broker.address), topics, "phone")


@on_each_broker
def test_an_update_arrives_in_chunks_that_name_it(server: Server, device: Device) -> None:
    device.add("n1")

    chunks = server.copy()

    assert b"".join(chunk.data for chunk in chunks) == DATA
    assert [chunk.index for chunk in chunks] == list(range(len(chunks)))
    assert {chunk.sha256 for chunk in chunks} == {hashlib.sha256(DATA).hexdigest()}
    assert {(chunk.nonce, chunk.count, chunk.size) for chunk in chunks} == {("n1", len(chunks), len(DATA))}


def test_an_accepted_update_leaves_the_outbox(server: Server, device: Device) -> None:
    device.add("n1")
    server.copy()

    server.ack("n1")
    device.hear()

    assert device.verdict() == ("n1", "accepted")
    assert device.store.outgoing() is None
    assert server.silent()


def test_a_lost_acknowledgement_makes_the_update_come_again(server: Server, device: Device) -> None:
    device.add("n1")
    first = server.copy()

    assert server.copy() == first
    server.ack("n1")
    device.hear()
    assert device.verdict() == ("n1", "accepted")


def test_only_missing_chunks_are_sent_again(server: Server, device: Device) -> None:
    device.limits = msgspec.structs.replace(device.limits, ack_timeout_s=PATIENCE_S)
    device.restart(device.session)
    device.add("n1")
    chunks = server.copy()

    server.ack("n1", "missing", missing=[3, 1])
    device.hear()

    assert [server.chunk(), server.chunk()] == [chunks[3], chunks[1]]
    assert server.silent()
    server.ack("n1")
    device.hear()
    assert device.verdict() == ("n1", "accepted")


def test_a_rejected_update_is_settled_and_not_sent_again(server: Server, device: Device) -> None:
    device.add("n1")
    server.copy()

    server.ack("n1", "rejected", reason="closed-round", text="round 4 is open")
    device.hear()

    assert device.verdict() == ("n1", "rejected")
    assert device.store.past("n1") is not None
    assert server.silent()


@pytest.mark.parametrize(
    ("nonce", "fields"), [("other", {}), ("n1", {"sha256": "ab" * 32}), ("n1", {"sha256": ""})]
)
@pytest.mark.parametrize("status", ["accepted", "rejected"])
def test_an_acknowledgement_of_another_update_settles_nothing(
    server: Server, device: Device, nonce: str, status: str, fields: dict[str, str]
) -> None:
    """Another task's, or another one for this task: somebody else's was there first, and ours is not in the sum."""
    device.add("n1")
    server.copy()

    server.ack(nonce, status, **fields)
    device.hear()

    server.copy()
    assert device.store.waits("n1")


@on_each_broker
def test_an_update_survives_the_agent(
    server: Server, device: Device, broker: BrokerProcess, connect: SessionFactory
) -> None:
    device.add("n1")
    first = server.chunk()
    device.session.stop()
    again = connect(broker.address)
    wait_up(again)

    device.restart(again)

    assert first.count > 1
    wait_for(server.session, IncomingMessage, lambda event: event.payload == messages.encode(first))
    server.ack("n1")
    device.hear()
    assert device.verdict() == ("n1", "accepted")


def test_an_unwritable_store_delays_the_outbox(server: Server, device: Device) -> None:
    device.faults += [StoreError("disk full"), StoreError("disk full")]
    device.add("n1")
    for _ in range(3):
        server.copy()
        server.ack("n1")
        device.hear()

    assert device.verdict() == ("n1", "accepted")
    assert device.log.texts.count("disk full") == 1, "people read once why nothing is sent"


def test_stopping_an_outbox_that_was_never_started_is_harmless(tmp_path: Path, limits: Limits) -> None:
    store = Store(tmp_path, limit_bytes=1000, history_rounds=5)
    session = Session(Address("127.0.0.1", 1), "x", limits=limits)

    Outbox(SignedSession(session), Topics("demo").device("phone"), store, limits, RecordedLog()).stop()
    store.close()


def test_an_update_found_before_its_wake_up_goes_up_once(server: Server, device: Device) -> None:
    """The outbox looks by itself now and then, and may do so between the end of a job and the wake-up."""
    device.limits = msgspec.structs.replace(device.limits, ack_timeout_s=1000.0)
    device.restart(device.session)
    device.store.finish_job(Outgoing("run", 3, "n1", DATA), None, "")
    chunks = server.copy()

    device.outbox.wake()
    server.ack("n1", "missing", missing=[1])
    device.hear()

    assert server.chunk() == chunks[1]
    server.ack("n1")
    device.hear()
    assert device.verdict() == ("n1", "accepted")
    assert server.silent()


def test_words_of_the_server_pile_up_nowhere_while_an_update_is_sent(
    server: Server, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    device.add("n1")
    server.copy()
    go = threading.Event()
    wait, sending = device.outbox._wait_for, threading.Event()

    def held(nonce: str, sha256: str, patience_s: float) -> Ack | None:
        sending.set()
        go.wait(PATIENCE_S)
        return wait(nonce, sha256, patience_s)

    monkeypatch.setattr(device.outbox, "_wait_for", held)
    sending.wait(PATIENCE_S)
    for _ in range(1000):
        device.outbox.deliver(Ack(round=3, nonce="n1", status="missing", missing=[0], sha256="of another"))
        device.outbox.send_again()
    assert device.outbox._acks.qsize() < 100
    go.set()

    server.ack("n1")
    device.hear()
    while device.log.events.empty():
        server.copy()
        server.ack("n1")
        device.hear()
    assert device.verdict() == ("n1", "accepted")


def test_an_update_that_is_to_be_offered_is_sent_when_it_is_asked_for(device: Device, server: Server) -> None:
    device.store.finish_job(Outgoing("run", 3, "n1", DATA, ask=True), None, "")
    device.outbox.wake()
    offer = server.chunk()
    assert offer.is_offer and (offer.index, offer.size) == (0, len(DATA)) and offer.count > 1
    assert server.silent()

    server.ack("n1", "missing", missing=list(range(offer.count)))
    device.hear()
    chunks = server.copy()
    assert b"".join(chunk.data for chunk in chunks) == DATA
    server.ack("n1")
    device.hear()
    assert device.verdict() == ("n1", "accepted")


def test_an_offer_that_nobody_answers_is_made_again(device: Device, server: Server) -> None:
    device.store.finish_job(Outgoing("run", 3, "n1", DATA, ask=True), None, "")
    device.outbox.wake()
    assert server.chunk().is_offer
    device.outbox.send_again()
    assert server.chunk().is_offer


def test_an_update_of_one_chunk_is_sent_at_once(device: Device, server: Server) -> None:
    device.store.finish_job(Outgoing("run", 3, "n1", b"small", ask=True), None, "")
    device.outbox.wake()
    assert server.chunk().data == b"small"
