"""Signed messages: protocol version 2 is version 1 in an envelope.

What is signed is the digest of the message as it travels, with what the message is, the topic that it is on (federation,
device, round) and a number that grows: a message is good for one place and one order. ::

    speaker = Speaker(KeyPair(path), Sequence(load, save))
    session.publish(topic, speaker.seal(topic, Status(online=True)))
    opened = open_message(Status, topic, payload)        # whose key it is, is the reader's question
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Generic

import msgspec

from edgefl.wire.errors import IdentityError, ProtocolError
from edgefl.wire.keys import MOST_SUCCESSIONS, KeyPair, PublicKey, Signature, Succession, verify
from edgefl.wire.mqtt.messages import (
    MALFORMED,
    Ack,
    AnyMessage,
    Decline,
    Hello,
    Message,
    Progress,
    Round,
    Status,
    Task,
    UpdateChunk,
    decode,
    encode,
    version_of,
)
from edgefl.wire.mqtt.profile_messages import ProfileAnswer, ProfileRequest

SIGNED = 2
"""``v`` of an envelope."""

_CONTEXTS: dict[type[Message], str] = {
    Round: "announcement",
    Task: "task",
    Ack: "ack",
    ProfileRequest: "profile-request",
    Status: "status",
    Hello: "hello",
    Progress: "progress",
    UpdateChunk: "update",
    Decline: "decline",
    ProfileAnswer: "profile",
}
"""What a signature is about: one of a task is none of an acknowledgement."""

_BLOCK = 1 << 20
"""Numbers that are taken from the disk at once."""

Number = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]


class Envelope(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``body`` is the encoded message, ``key`` the sender's public key, ``at`` the sender's next number.

    ``succession``: how ``key`` follows from keys that the reader may know (announcements and hellos of whoever rotated).
    """

    v: int
    key: PublicKey
    at: Number
    signature: Signature
    body: bytes
    succession: Annotated[tuple[Succession, ...], msgspec.Meta(max_length=MOST_SUCCESSIONS)] = ()


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Envelope)


@dataclass(frozen=True)
class Opened(Generic[AnyMessage]):
    """A message whose signature holds for ``key``; a bare one has none, and ``at`` 0."""

    message: AnyMessage
    key: bytes = b""
    at: int = 0


def signed_text(kind: type[Message], topic: str, at: int, body: bytes) -> bytes:
    """The exact bytes that are signed. Of the message its digest: Ed25519 goes over its text twice, by a slower hash."""
    return text_of_digest(kind, topic, at, hashlib.sha256(body).digest())


def text_of_digest(kind: type[Message], topic: str, at: int, digest: bytes) -> bytes:
    """The same for who has the SHA-256 of the message already."""
    return f"edgefl/{_CONTEXTS[kind]}/1\n{topic}\n{at}\n".encode() + digest


def unwrap(payload: bytes, kind: type[Message] = Message) -> Envelope | None:
    """The envelope of a ``kind`` in ``payload``, unverified; None for a bare message. ProtocolError if it is malformed."""
    if version_of(kind, payload) != SIGNED:
        return None
    try:
        return _decoder.decode(payload)
    except MALFORMED as error:
        raise ProtocolError(f"the envelope of a {kind.__name__} is malformed: {error}") from error


def verified(kind: type[AnyMessage], topic: str, envelope: Envelope) -> AnyMessage:
    """The message of ``envelope``; IdentityError unless its signature holds for its key, this topic and ``kind``."""
    if not verify(envelope.key, envelope.signature, signed_text(kind, topic, envelope.at, envelope.body)):
        raise IdentityError(
            "wrong-signature",
            f"the signature of a {kind.__name__} on {topic} does not hold: it was changed, or signed for another place",
        )
    return decode(kind, envelope.body)


def open_message(kind: type[AnyMessage], topic: str, payload: bytes) -> Opened[AnyMessage]:
    """A message with the key that signed it, if any did. ProtocolError, or IdentityError if a signature does not hold."""
    envelope = unwrap(payload, kind)
    if envelope is None:
        return Opened(decode(kind, payload))
    return Opened(verified(kind, topic, envelope), envelope.key, envelope.at)


def peek(kind: type[AnyMessage], payload: bytes) -> AnyMessage:
    """What a message says, whoever may have written it: for people who watch, never to act on."""
    envelope = unwrap(payload, kind)
    return decode(kind, payload if envelope is None else envelope.body)


class Sequence:
    """Numbers that grow, also over restarts and without a clock: blocks of them are taken from what ``load`` and ``save``
    keep. With a clock they stay ahead of a store that was set back, too. Thread-safe."""

    def __init__(
        self, load: Callable[[], int], save: Callable[[int], None], clock: Callable[[], float] = time.time
    ) -> None:
        self._save = save
        self._lock = threading.Lock()
        self._next = self._end = max(load(), int(clock() * 1_000_000))

    def next(self, count: int = 1) -> int:
        """The first of ``count`` numbers that are used by nobody else."""
        with self._lock:
            if self._next + count > self._end:
                self._end = self._next + count + _BLOCK
                self._save(self._end)
            number = self._next
            self._next += count
            return number


class Speaker:
    """Signs what one side says. Thread-safe."""

    def __init__(self, keys: KeyPair, numbers: Sequence) -> None:
        self.keys = keys
        self.numbers = numbers

    def seal(self, topic: str, message: Message, at: int | None = None) -> bytes:
        """The payload for ``topic``; ``at``: a number that was taken before, by default the next."""
        body = encode(message)
        number = self.numbers.next() if at is None else at
        introduces = isinstance(message, Round | Hello)
        return _encoder.encode(
            Envelope(
                v=SIGNED,
                key=self.keys.public,
                at=number,
                signature=self.keys.sign(signed_text(type(message), topic, number, body)),
                body=body,
                succession=self.keys.successions if introduces else (),
            )
        )


Seal = Callable[[str, Message], bytes]
"""A message as it is published on a topic."""


def bare(topic: str, message: Message) -> bytes:
    """Without a signature: whoever knows a key of the sender does not listen."""
    return encode(message)
