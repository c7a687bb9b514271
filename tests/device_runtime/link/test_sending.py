"""What the outbox sends, in which pieces and how often, on a link made of scripts."""

from __future__ import annotations

import hashlib
import math
import queue
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from edgefl.errors import StoreError
from edgefl.wire import tensors
from edgefl.wire.limits import Limits
from edgefl.wire.mqtt import messages
from edgefl.wire.mqtt.envelope import peek
from edgefl.wire.mqtt.messages import ENVELOPE_BYTES, Ack, ResourceUsage, Update, UpdateChunk
from edgefl.wire.mqtt.topics import Topics
from edgefl_device.link.identity import SignedSession
from edgefl_device.link.outbox import Outbox, history_entry
from edgefl_device.store.database import Outgoing, PastRound, Store
from tests.support.device_logs import RecordedLog
from tests.wire.mqtt.events import wait_until

PATIENCE_S = 60.0
NEVER_S = 1e6
MINE = Topics("demo").device("phone")


class Delivery:
    """Done as its link says."""

    def __init__(self, link: Link, number: int) -> None:
        self._link, self._number = link, number

    def wait(self, timeout_s: float) -> bool:
        assert timeout_s > 0
        return self._link.delivers(self._number)


class Link:
    """A session that hands what is published to the test. ``delivers``: whether message ``number`` is with the broker."""

    def __init__(self) -> None:
        self.connected = True
        self.sent: queue.SimpleQueue[tuple[str, bytes]] = queue.SimpleQueue()
        self.count = 0
        self.delivers: Callable[[int], bool] = lambda _number: True

    def wake(self) -> None: ...

    def publish(self, topic: str, payload: bytes, **_: object) -> Delivery:
        self.count += 1
        self.sent.put((topic, payload))
        return Delivery(self, self.count - 1)

    def chunks(self, number: int) -> list[UpdateChunk]:
        """The next ``number`` messages."""
        return [peek(UpdateChunk, self.sent.get(timeout=PATIENCE_S)[1]) for _ in range(number)]


class Device:
    """A store and its outbox on a link, before anything is started."""

    def __init__(self, folder: Path, limits: Limits, **changes: object) -> None:
        self.store = Store(folder, limit_bytes=1 << 20, history_rounds=5)
        self.link = Link()
        self.digests: dict[str, str] = {}
        limits = msgspec.structs.replace(limits, **{"ack_timeout_s": NEVER_S, **changes})
        self.log = RecordedLog()
        session = SignedSession(self.link)  # type: ignore[arg-type]
        self.outbox = Outbox(session, MINE, self.store, limits, self.log)

    def add(self, nonce: str, data: bytes) -> None:
        self.digests[nonce] = hashlib.sha256(data).hexdigest()
        self.store.finish_job(Outgoing("run", 3, nonce, data), None, "")
        self.outbox.wake()

    def hear(self, nonce: str, status: str = "accepted", missing: list[int] | None = None) -> None:
        self.outbox.deliver(
            Ack(
                round=3,
                nonce=nonce,
                status=status,  # type: ignore[arg-type]
                missing=missing or [],
                sha256=self.digests.get(nonce, ""),
            )
        )

    def word(self) -> tuple[str, str]:
        while (status := self.log.events.get(timeout=PATIENCE_S).event) == "store":
            pass
        return self.store.history()[-1].nonce, status


@pytest.fixture
def make(tmp_path: Path, limits: Limits) -> Iterator[Callable[..., Device]]:
    made: list[Device] = []

    def device(**changes: object) -> Device:
        made.append(Device(tmp_path / str(len(made)), limits, **changes))
        return made[-1]

    yield device
    for each in made:
        each.link.connected = False
        each.outbox.stop()
        each.store.close()


# -- pieces ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chunk_bytes", "room"),
    [
        (1024, 1024 - ENVELOPE_BYTES),
        (2 * ENVELOPE_BYTES, ENVELOPE_BYTES),
        (2 * ENVELOPE_BYTES - 2, ENVELOPE_BYTES - 1),
        (256, max(128, 256 - ENVELOPE_BYTES)),
    ],
)
@pytest.mark.parametrize(("more", "count"), [(0, 3), (1, 4)])
def test_a_piece_is_what_its_envelope_leaves_of_a_message_or_half_of_it(
    make: Callable[..., Device], chunk_bytes: int, room: int, more: int, count: int
) -> None:
    device, data = make(chunk_bytes=chunk_bytes), bytes(3 * room + more)
    device.add("n1", data)
    device.outbox.start()

    chunks = device.link.chunks(count)

    assert [len(chunk.data) for chunk in chunks] == [room] * 3 + [more] * (count - 3)
    assert {(chunk.count, chunk.size) for chunk in chunks} == {(count, len(data))}


def test_the_bytes_sent_are_those_of_all_messages(make: Callable[..., Device]) -> None:
    device = make()
    device.add("n1", bytes(2000))
    device.outbox.start()
    first = device.link.sent.get(timeout=PATIENCE_S)
    rest = [device.link.sent.get(timeout=PATIENCE_S) for _ in range(3)]
    device.hear("n1")
    device.word()

    assert [topic for topic, _ in (first, *rest)] == [MINE.update(3, index) for index in range(4)]
    assert device.outbox.sent_bytes == sum(len(payload) for _, payload in (first, *rest))


# -- words -----------------------------------------------------------------------------------------------------


def test_missing_pieces_are_those_that_exist_from_the_first_to_the_last(make: Callable[..., Device]) -> None:
    device = make()
    device.add("n1", bytes(2000))
    device.outbox.start()
    chunks = device.link.chunks(4)

    device.hear("n1", "missing", [-1, 0, 3, 4, 5, *[0] * 5000])

    assert device.link.chunks(2) == [chunks[0], chunks[3]]
    device.hear("n1")
    assert device.word() == ("n1", "accepted")
    assert device.link.count == 6


def test_what_is_missing_is_all_again_where_the_next_reason_is_another(make: Callable[..., Device]) -> None:
    device = make()
    device.add("n1", bytes(2000))
    device.outbox.start()
    chunks = device.link.chunks(4)
    device.hear("n1", "missing", [2])
    assert device.link.chunks(1) == [chunks[2]]

    device.outbox.send_again()

    assert device.link.chunks(4) == chunks


def test_an_early_word_counts_unlike_a_reason_to_send_again(make: Callable[..., Device]) -> None:
    device = make()
    device.add("n1", b"update")
    device.outbox.send_again()
    device.hear("other")
    device.hear("n1")
    device.outbox.send_again()
    device.outbox.start()

    assert device.word() == ("n1", "accepted")
    assert device.link.count == 1


def test_words_that_came_early_are_read_in_their_order(make: Callable[..., Device]) -> None:
    device = make()
    device.add("n1", b"update")
    device.hear("n1", "rejected")
    device.hear("n1")
    device.outbox.start()

    assert device.word() == ("n1", "rejected")


def test_a_server_that_says_nothing_is_asked_less_and_less_often(make: Callable[..., Device]) -> None:
    device, waits = make(ack_timeout_s=2.0), []

    def wait_for(_nonce: str, _sha256: str, patience_s: float) -> Ack | None:
        waits.append(patience_s)
        device.link.connected = len(waits) < 8
        return None

    device.outbox._wait_for = wait_for  # type: ignore[method-assign]
    device.outbox._send_until_settled(Outgoing("run", 3, "n1", b"update"))

    assert waits == [2.0, 4.0, 8.0, 16.0, 32.0, 32.0, 32.0, 32.0]


def test_updates_follow_one_another_without_another_wake_up(make: Callable[..., Device]) -> None:
    device = make()
    device.add("n1", b"one")
    device.add("n2", b"two")
    device.outbox.start()

    for nonce in ("n1", "n2"):
        assert [chunk.nonce for chunk in device.link.chunks(1)] == [nonce]
        device.hear(nonce)
        assert device.word() == (nonce, "accepted")
    assert device.store.outgoing() is None


def test_a_bad_store_is_asked_again(make: Callable[..., Device], monkeypatch: pytest.MonkeyPatch) -> None:
    device, faults = make(), [StoreError("full"), StoreError("full")]
    read = device.store.outgoing

    def outgoing() -> Outgoing | None:
        if faults:
            raise faults.pop()
        return read()

    monkeypatch.setattr(device.store, "outgoing", outgoing)
    device.add("n1", b"update")
    device.outbox.start()
    device.link.chunks(1)
    device.hear("n1")

    assert device.word() == ("n1", "accepted")


# -- a slow link, or none --------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [1, 3])
def test_a_broken_link_takes_nothing_more(make: Callable[..., Device], window: int) -> None:
    device, asked = make(upload_window=window), threading.Event()

    def breaks(number: int) -> bool:
        assert number == 0
        device.link.connected = False
        asked.set()
        return False

    device.link.delivers = breaks
    device.add("n1", bytes(5000))
    device.outbox.start()

    assert asked.wait(PATIENCE_S)
    device.outbox.stop()
    assert device.link.count == window


def test_no_more_chunks_than_the_window_are_ahead_of_the_broker(make: Callable[..., Device]) -> None:
    device, delivered = make(upload_window=2), set[int]()
    device.link.delivers = lambda number: number in delivered
    device.add("n1", bytes(2000))
    device.outbox.start()

    for sent in (2, 3, 4):
        wait_until(lambda sent=sent: device.link.count == sent, f"{sent} chunks on their way")  # type: ignore[misc]
        delivered.add(sent - 2)


def test_nothing_is_sent_without_a_connection_and_all_once_there_is_one(make: Callable[..., Device]) -> None:
    device = make()
    device.link.connected = False
    device.add("n1", b"update")
    device.outbox.start()
    assert device.link.count == 0

    device.link.connected = True
    device.outbox.wake()

    assert [chunk.data for chunk in device.link.chunks(1)] == [b"update"]


def test_an_outbox_that_is_stopped_ends_its_thread_though_no_word_came(make: Callable[..., Device]) -> None:
    device = make()
    device.add("n1", b"update")
    device.outbox.start()
    device.link.chunks(1)

    device.outbox.stop()

    assert not device.outbox._thread.is_alive()
    assert device.link.count == 1
    assert device.store.waits("n1")


# -- what is remembered ----------------------------------------------------------------------------------------


def test_the_history_of_an_update_is_its_own_and_the_servers_word() -> None:
    update = Update(
        run="run",
        round=3,
        device="phone",
        nonce="n1",
        tier="weak",
        model_version="v1",
        samples=10,
        metrics={"loss": 0.25, "correct": 2.0},
        profile=ResourceUsage(
            step_ms=1.5,
            forward_ms=2.5,
            load_ms=3.5,
            idle_bytes=4,
            peak_bytes=5,
            down_bytes=6,
            down_wire_bytes=7,
        ),
        tensors=tensors.dump({"w": np.zeros(1, np.float32)}),
        codec="dense",
        codec_version=1,
    )
    data = messages.encode(update)
    ack = Ack(round=3, nonce="n1", status="rejected", reason="closed-round")

    assert history_entry(Outgoing("run", 3, "n1", data), ack) == PastRound(
        run="run",
        round=3,
        tier="weak",
        nonce="n1",
        outcome="rejected",
        reason="closed-round",
        loss=0.25,
        step_ms=1.5,
        peak_bytes=5,
        down_bytes=6,
        up_bytes=len(data),
    )
    quiet = messages.encode(msgspec.structs.replace(update, metrics={"correct": 2.0}))
    assert math.isnan(history_entry(Outgoing("run", 3, "n1", quiet), ack).loss)


def test_of_an_unreadable_update_word_and_size_are_remembered() -> None:
    past = history_entry(
        Outgoing("run", 3, "n1", b"\xc1nonsense"), Ack(round=3, nonce="n1", status="accepted")
    )

    assert (past.run, past.round, past.nonce, past.outcome, past.tier) == ("run", 3, "n1", "accepted", "")
    assert (past.up_bytes, past.step_ms, past.peak_bytes, past.down_bytes) == (9, 0.0, 0, 0)
    assert math.isnan(past.loss)
