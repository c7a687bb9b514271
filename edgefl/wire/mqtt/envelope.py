"""Signed messages: protocol version 2 is version 1 in an envelope.

The signature covers the digest of the message as it travels, the type of the message, the topic (federation, device,
round) and a number that grows. So a message is valid in one place and one order only. ::

    signer = MessageSigner(KeyPair(path), MessageCounter(store))
    session.publish(topic, signer.seal(topic, Status(online=True)))
    opened = open_message(Status, topic, payload)        # the reader decides whether it trusts opened.key
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Generic, Protocol

import msgspec

from edgefl.errors import IdentityError, ProtocolError
from edgefl.wire.keys import MOST_SUCCESSIONS, KeyPair, PublicKey, Signature, Succession, verify
from edgefl.wire.mqtt.messages import (
    MALFORMED,
    Ack,
    AnyMessage,
    Decline,
    Hello,
    Message,
    ProfileAnswer,
    ProfileRequest,
    Progress,
    Round,
    Status,
    Task,
    UpdateChunk,
    decode,
    encode,
    version_of,
)

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
"""Context of each type's signature: the signature of a task is not valid for an acknowledgement."""

_BLOCK = 1 << 20
"""Numbers that are reserved on disk at a time."""

Number = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]


class Envelope(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``body`` is the encoded message, ``key`` the sender's public key, ``at`` the sender's next number.

    ``succession``: statements that lead from keys the reader may know to ``key``, in announcements and hellos after a
    rotation.
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
class OpenedMessage(Generic[AnyMessage]):
    """A message with a valid signature of ``key``. An unsigned message has no key, and ``at`` 0."""

    message: AnyMessage
    key: bytes = b""
    at: int = 0


def signed_text(kind: type[Message], topic: str, at: int, body: bytes) -> bytes:
    """Return the exact bytes that are signed. They hold the digest of the message, because Ed25519 reads its text twice."""
    return text_of_digest(kind, topic, at, hashlib.sha256(body).digest())


def text_of_digest(kind: type[Message], topic: str, at: int, digest: bytes) -> bytes:
    """Return :func:`signed_text` for a message whose SHA-256 is known."""
    return f"edgefl/{_CONTEXTS[kind]}/1\n{topic}\n{at}\n".encode() + digest


def unwrap(payload: bytes, kind: type[Message] = Message) -> Envelope | None:
    """Return the unverified envelope of a ``kind`` in ``payload``, or None for an unsigned message.

    Raises:
        ProtocolError: The payload is malformed.
    """
    if version_of(kind, payload) != SIGNED:
        return None
    try:
        return _decoder.decode(payload)
    except MALFORMED as error:
        raise ProtocolError(f"the envelope of a {kind.__name__} is malformed: {error}") from error


def verified(kind: type[AnyMessage], topic: str, envelope: Envelope) -> AnyMessage:
    """Return the message of ``envelope``.

    Raises:
        IdentityError: The signature is not valid for its key, this topic and ``kind``.
    """
    if not verify(envelope.key, envelope.signature, signed_text(kind, topic, envelope.at, envelope.body)):
        raise IdentityError(
            "wrong-signature",
            f"the signature of a {kind.__name__} on {topic} does not hold: it was changed, or signed for another place",
        )
    return decode(kind, envelope.body)


def open_message(kind: type[AnyMessage], topic: str, payload: bytes) -> OpenedMessage[AnyMessage]:
    """Return a message with the key that signed it, if any did.

    Raises:
        ProtocolError: The message is malformed.
        IdentityError: The signature is not valid.
    """
    envelope = unwrap(payload, kind)
    if envelope is None:
        return OpenedMessage(decode(kind, payload))
    return OpenedMessage(verified(kind, topic, envelope), envelope.key, envelope.at)


def peek(kind: type[AnyMessage], payload: bytes) -> AnyMessage:
    """Return a message without verifying its signature: for displays only, never to act on."""
    envelope = unwrap(payload, kind)
    return decode(kind, payload if envelope is None else envelope.body)


class CounterStore(Protocol):
    """Storage of a :class:`MessageCounter`."""

    def number(self) -> int:
        """Return the stored number, 0 at first."""

    def keep_number(self, number: int) -> None:
        """Store a number. A failure may be ignored, as the clock keeps the next process ahead."""


class MessageCounter:
    """Numbers that grow, also across restarts. Thread-safe.

    Blocks of numbers are reserved in storage before use. The clock keeps them ahead of a store that was restored from a
    backup.

    Args:
        store: Storage of the reserved numbers. None: the clock alone keeps them ahead.
        now: Seconds since 1970, by default the current time.
    """

    def __init__(self, store: CounterStore | None = None, now: float | None = None) -> None:
        self._store = store
        self._lock = threading.Lock()
        clock = int((time.time() if now is None else now) * 1_000_000)
        self._next = self._end = max(store.number() if store else 0, clock)

    def next(self, count: int = 1) -> int:
        """Reserve ``count`` numbers and return the first."""
        with self._lock:
            if self._next + count > self._end:
                self._end = self._next + count + _BLOCK
                if self._store is not None:
                    self._store.keep_number(self._end)
            number = self._next
            self._next += count
            return number


class MessageSigner:
    """Signer of one side's messages. Thread-safe."""

    def __init__(self, keys: KeyPair, numbers: MessageCounter) -> None:
        self.keys = keys
        self.numbers = numbers

    def seal(self, topic: str, message: Message, at: int | None = None) -> bytes:
        """Return the signed payload for ``topic``.

        Args:
            topic: Topic that the payload is valid for.
            message: Message to sign.
            at: Number that was reserved before, by default the next.
        """
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
"""Function that encodes a message for a topic."""


def bare(topic: str, message: Message) -> bytes:
    """Return an unsigned message. A reader that knows a key of the sender ignores it."""
    return encode(message)
