"""What waits for a process is bounded in number and bytes."""

from __future__ import annotations

import queue
import threading

import pytest

from edgefl.wire.mqtt.events import OVERHEAD_BYTES, Event, Inbox, IncomingMessage, Wakeup


def inbox(messages: int = 10, nbytes: int = 1 << 20, patience_s: float = 0.0) -> Inbox[Event]:
    return Inbox(messages=messages, nbytes=nbytes, patience_s=patience_s)


def test_messages_that_find_no_room_are_dropped_and_counted() -> None:
    box = inbox(messages=3)
    for number in range(5):
        box.put(IncomingMessage(str(number), b""))
    assert (box.dropped, box.qsize()) == (2, 3)
    assert [box.get().topic for _ in range(3)] == ["0", "1", "2"]  # type: ignore[union-attr]
    with pytest.raises(queue.Empty):
        box.get_nowait()


def test_bytes_are_bounded_and_one_message_is_always_taken() -> None:
    box = inbox(nbytes=2 * (OVERHEAD_BYTES + 100))
    box.put(IncomingMessage("large", bytes(10_000)))
    box.put(IncomingMessage("small", b""))
    assert (box.dropped, box.qsize()) == (1, 1)
    box.get()
    for _ in range(3):
        box.put(IncomingMessage("t", bytes(100)))
    assert (box.dropped, box.qsize()) == (2, 2)


def test_what_the_process_tells_itself_always_finds_room() -> None:
    box = inbox(messages=1)
    box.put(IncomingMessage("t", b""))
    box.put(Wakeup())
    assert box.qsize() == 2 and not box.dropped


def test_the_network_waits_for_room() -> None:
    box = inbox(messages=1, patience_s=30.0)
    box.put(IncomingMessage("first", b""))
    sender = threading.Thread(target=box.put, args=(IncomingMessage("second", b""),))
    sender.start()
    assert box.get() == IncomingMessage("first", b"")
    assert box.get(timeout=300.0) == IncomingMessage("second", b"")
    sender.join()
    assert not box.dropped
