"""Log of an agent's messages, in the order of their arrival."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from edgefl.errors import IdentityError, ProtocolError
from edgefl.wire.mqtt.envelope import OpenedMessage, open_message
from edgefl.wire.mqtt.events import Event, IncomingMessage
from edgefl.wire.mqtt.messages import Decline, Hello, Message, ProfileAnswer, Progress, Status, UpdateChunk
from edgefl.wire.mqtt.topics import Topics

KINDS: dict[str, type[Message]] = {
    "status": Status,
    "hello": Hello,
    "progress": Progress,
    "updates": UpdateChunk,
    "shards": UpdateChunk,
    "declines": Decline,
    "profiles": ProfileAnswer,
}
"""Message types by part of the topic."""


@dataclass(frozen=True)
class AgentMessage:
    """One message of the agent.

    Attributes:
        place: its index in the log.
        when: monotonic time of its arrival.
        message: None if it cannot be decoded or its signature is invalid; ``problem`` has the reason.
        key: public key of the signature; empty without one.
        at: number in the envelope.
    """

    place: int
    when: float
    topic: str
    leaf: str
    numbers: tuple[int, ...]
    payload: bytes
    retained: bool
    message: Message | None
    key: bytes = b""
    at: int = 0
    problem: str = ""


class MessageLog:
    """All messages so far; thread-safe."""

    def __init__(self, topics: Topics) -> None:
        self._topics = topics
        self._entries: list[AgentMessage] = []
        self._news = threading.Condition()

    def mark(self) -> int:
        """Return the current end of the log."""
        with self._news:
            return len(self._entries)

    def put(self, event: Event) -> None:
        """Add a message of a session."""
        if isinstance(event, IncomingMessage):
            self.add(event.topic, event.payload, event.retained)

    def add(self, topic: str, payload: bytes, retained: bool) -> None:
        """Add a message. Ignores topics that are not a device's."""
        try:
            _, leaf, numbers = self._topics.parse_device(topic)
        except ProtocolError:
            return
        kind = KINDS.get(leaf)
        if kind is None or not payload:
            return
        problem, opened = "", OpenedMessage[Message](Message())
        try:
            opened = open_message(kind, topic, payload)
        except (ProtocolError, IdentityError) as error:
            problem = error.message
        with self._news:
            entry = AgentMessage(
                len(self._entries),
                time.monotonic(),
                topic,
                leaf,
                numbers,
                payload,
                retained,
                None if problem else opened.message,
                opened.key,
                opened.at,
                problem,
            )
            self._entries.append(entry)
            self._news.notify_all()

    def since(self, mark: int, *leaves: str) -> list[AgentMessage]:
        """Return the messages after ``mark`` of these kinds (none: all)."""
        with self._news:
            return [each for each in self._entries[mark:] if not leaves or each.leaf in leaves]

    def wait(
        self, mark: int, leaf: str, within_s: float, test: Callable[[AgentMessage], bool]
    ) -> AgentMessage | None:
        """Wait for the first message of a kind after ``mark`` that passes ``test``; None on timeout."""
        until = time.monotonic() + within_s
        with self._news:
            at = mark
            while True:
                for entry in self._entries[at:]:
                    if entry.leaf == leaf and test(entry):
                        return entry
                at = len(self._entries)
                left = until - time.monotonic()
                if left <= 0:
                    return None
                self._news.wait(left)
