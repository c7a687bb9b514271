"""An authenticator, and messages of a phone."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from edgefl.errors import IdentityError
from edgefl.wire.keys import rotate
from edgefl.wire.mqtt.envelope import MessageSigner
from edgefl.wire.mqtt.messages import Decline, Hello, Message, Status, UpdateChunk
from edgefl.wire.mqtt.topics import Topics
from edgefl_server.events import Event, Noted
from edgefl_server.identity.authenticator import Authenticator
from edgefl_server.identity.registry import Registry
from tests.wire.mqtt.speakers import speaker_in

MINE = Topics("demo").device("phone")
CHUNK = UpdateChunk(nonce="n", sha256="ab" * 32, index=0, count=1, size=1, data=b"x")
DECLINE = Decline(round=1, nonce="n", reason="failed")


def hello(samples: int = 1, **fields: object) -> Hello:
    return Hello(agent="t", memory_bytes=1, cores=1, samples=samples, engines={}, **fields)  # type: ignore[arg-type]


def topic_of(message: Message) -> str:
    topics = {Hello: MINE.hello, Status: MINE.status, Decline: MINE.declines, UpdateChunk: MINE.update(1, 0)}
    return topics.get(type(message), MINE.progress)


@dataclass
class Lab:
    """Authenticator of a registry that a test may restart, and the notices of new keys."""

    path: Path
    enrolled: bool = False
    now: float = 1000.0
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self.registry = Registry(self.path, "demo")
        self.authenticator = Authenticator(
            self.registry, self, enrolled=self.enrolled, clock=lambda: self.now
        )

    def emit(self, event: Event) -> None:
        assert isinstance(event, Noted)
        self.notes.append(event.text)

    def take(self, payload: bytes, message: Message) -> Message:
        return self.authenticator.open(type(message), "phone", topic_of(message), payload)

    def say(self, speaker: MessageSigner, message: Message) -> bytes:
        payload = speaker.seal(topic_of(message), message)
        self.take(payload, message)
        return payload

    def refuses(self, payload: bytes, message: Message, reason: str) -> None:
        before = self.registry.all()
        with pytest.raises(IdentityError) as caught:
            self.take(payload, message)
        assert caught.value.reason == reason
        assert self.registry.all() == before

    def refuses_of(self, speaker: MessageSigner, message: Message, reason: str) -> None:
        self.refuses(speaker.seal(topic_of(message), message), message, reason)


def rotated(path: Path, number: int, now: float, overlap_s: float = 60.0) -> MessageSigner:
    rotate(path, overlap_s=overlap_s, now=now)
    return speaker_in(path, 1 << (41 + number))
