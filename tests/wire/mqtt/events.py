"""Waiting for what a session reports, with a bound: no test sleeps."""

from __future__ import annotations

import queue
import socket
import time
from collections.abc import Callable
from typing import TypeVar

from edgefl.wire.mqtt.events import Connected, Event, IncomingMessage
from edgefl.wire.mqtt.session import Session

PATIENCE_S = 300.0

Kind = TypeVar("Kind", bound=Event)


def wait_for(session: Session, kind: type[Kind], accept: Callable[[Kind], bool] = lambda _: True) -> Kind:
    """The next event of ``kind`` that ``accept`` likes; everything before it is dropped."""
    deadline = time.monotonic() + PATIENCE_S
    while (left := deadline - time.monotonic()) > 0:
        try:
            event = session.inbox.get(timeout=left)
        except queue.Empty:
            break
        if isinstance(event, kind) and accept(event):
            return event
    raise AssertionError(f"no {kind.__name__} within {PATIENCE_S} s")


def wait_up(session: Session) -> Connected:
    return wait_for(session, Connected)


def wait_message(session: Session, topic: str) -> bytes:
    return wait_for(session, IncomingMessage, lambda event: event.topic == topic).payload


def hear(session: Session, topic: str, first: bytes = b"subscribed", *, retain: bool = False) -> Connected:
    """Subscribe to a topic, and wait until a message of this session's own comes back."""
    session.subscribe([topic])
    connected = wait_up(session)
    session.publish(topic, first, retain=retain)
    wait_message(session, topic)
    return connected


def cut(session: Session, *, for_good: bool = False) -> None:
    """End the connection as a vanished phone does: without goodbye, so that the broker says the will."""
    connection = session._client.socket()
    assert isinstance(connection, socket.socket)
    if for_good:
        session._stopping.set()
        session._client.disconnect = lambda: None  # type: ignore[method-assign, assignment, misc, return-value]
    connection.shutdown(socket.SHUT_RDWR)


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Poll a condition that no queue reports."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        if condition():
            return
        time.sleep(0.005)
    raise AssertionError(f"{what}: not within {PATIENCE_S} s")
