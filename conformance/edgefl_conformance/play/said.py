"""What an agent said, in the order in which it came."""

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
"""By the part of the topic that says what it is."""


@dataclass(frozen=True)
class Said:
    """One message of the agent. ``message`` is None where it cannot be read or its signature does not hold; ``problem`` says
    why. ``key`` is empty where it was not signed."""

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


class Log:
    """All that was said; thread-safe."""

    def __init__(self, topics: Topics) -> None:
        self._topics = topics
        self._entries: list[Said] = []
        self._news = threading.Condition()

    def mark(self) -> int:
        """Where the log ends now."""
        with self._news:
            return len(self._entries)

    def put(self, event: Event) -> None:
        """Add a message of a session."""
        if isinstance(event, IncomingMessage):
            self.add(event.topic, event.payload, event.retained)

    def add(self, topic: str, payload: bytes, retained: bool) -> None:
        """A message came. What is on no topic of a device is passed over."""
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
            entry = Said(
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

    def since(self, mark: int, *leaves: str) -> list[Said]:
        """What came after ``mark``, of these kinds (none: of all)."""
        with self._news:
            return [each for each in self._entries[mark:] if not leaves or each.leaf in leaves]

    def wait(self, mark: int, leaf: str, within_s: float, test: Callable[[Said], bool]) -> Said | None:
        """The first of its kind after ``mark`` that passes ``test``; None if there is none within so many seconds."""
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
