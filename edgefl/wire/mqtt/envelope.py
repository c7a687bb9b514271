"""Signed messages. Protocol version 2 wraps a message of version 1 in a signed envelope.

The signature covers the digest of the message, its type, its topic (which names federation, device and round) and a
number that increases. So a message cannot be replayed on another topic or out of order. ::

    signer = MessageSigner(KeyPair(path), MessageCounter(store))
    session.publish(topic, signer.seal(topic, Status(online=True)))
    opened = open_message(Status, topic, payload)        # the caller decides whether it trusts opened.key
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
"""Name of each message type in the signed bytes, so that the signature of a task is not valid for an acknowledgement."""

_BLOCK = 1 << 20
"""Numbers that are reserved on disk at a time."""

Number = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]


class Envelope(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Signed envelope of a message.

    Attributes:
        v: Version, :data:`SIGNED`.
        key: Public key of the sender.
        at: Sequence number of the sender. It increases with each message.
        signature: Signature by ``key`` of :func:`signed_text`.
        body: Encoded message.
        succession: Statements that link ``key`` to older keys of the sender, in announcements and hellos after a key
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
    """Decoded message, with its signer.

    Attributes:
        message: Message.
        key: Public key that signed it, verified. Empty if the message was not signed.
        at: Sequence number, 0 if the message was not signed.
    """

    message: AnyMessage
    key: bytes = b""
    at: int = 0


def signed_text(kind: type[Message], topic: str, at: int, body: bytes) -> bytes:
    """Return the bytes that are signed for a message. They contain the digest of ``body``, because Ed25519 reads its
    input twice.

    Args:
        kind: Type of the message.
        topic: MQTT topic.
        at: Sequence number.
        body: Encoded message.
    """
    return text_of_digest(kind, topic, at, hashlib.sha256(body).digest())


def text_of_digest(kind: type[Message], topic: str, at: int, digest: bytes) -> bytes:
    """Return the same bytes as :func:`signed_text`, for a message whose SHA-256 is ``digest``."""
    return f"edgefl/{_CONTEXTS[kind]}/1\n{topic}\n{at}\n".encode() + digest


def unwrap(payload: bytes, kind: type[Message] = Message) -> Envelope | None:
    """Return the envelope in ``payload`` without verifying it, or None if the message is not signed.

    Args:
        payload: Payload of an MQTT message.
        kind: Expected type of the message, for error texts.

    Raises:
        ProtocolError: The payload is malformed.
    """
    if version_of(kind, payload) != SIGNED:
        return None
    try:
        return _decoder.decode(payload)
    except MALFORMED as error:
        raise ProtocolError(
            f"the envelope of a {kind.__name__} is malformed: {error}", kind=kind.__name__
        ) from error


def verify_envelope(kind: type[AnyMessage], topic: str, envelope: Envelope) -> AnyMessage:
    """Verify the signature of an envelope and return its message.

    Args:
        kind: Type of the message.
        topic: MQTT topic on which it arrived.
        envelope: Envelope of the message.

    Raises:
        IdentityError: The signature is not valid for this key, topic and type.
        ProtocolError: The message is malformed.
    """
    if not verify(envelope.key, envelope.signature, signed_text(kind, topic, envelope.at, envelope.body)):
        raise IdentityError(
            "wrong-signature",
            f"the signature of a {kind.__name__} on {topic} does not hold: it was changed, or signed for another place",
        )
    return decode(kind, envelope.body)


def open_message(kind: type[AnyMessage], topic: str, payload: bytes) -> OpenedMessage[AnyMessage]:
    """Decode a message. Verify its signature if it has one; the caller decides whether it trusts the key.

    Args:
        kind: Type of the message.
        topic: MQTT topic on which it arrived.
        payload: Payload of the MQTT message.

    Raises:
        ProtocolError: The message is malformed.
        IdentityError: The signature is not valid.
    """
    envelope = unwrap(payload, kind)
    if envelope is None:
        return OpenedMessage(decode(kind, payload))
    return OpenedMessage(verify_envelope(kind, topic, envelope), envelope.key, envelope.at)


def peek(kind: type[AnyMessage], payload: bytes) -> AnyMessage:
    """Decode a message of type ``kind`` without verifying its signature. Use it for display only.

    Raises:
        ProtocolError: The message is malformed.
    """
    envelope = unwrap(payload, kind)
    return decode(kind, payload if envelope is None else envelope.body)


class CounterStore(Protocol):
    """Interface of the storage for a :class:`MessageCounter`."""

    def number(self) -> int:
        """Return the stored number, or 0 if there is none."""

    def keep_number(self, number: int) -> None:
        """Store a number. A failed write may be ignored, because the next process starts from the clock at least."""


class MessageCounter:
    """Source of sequence numbers that increase across restarts. Thread-safe.

    Numbers are reserved in storage in blocks. They start from the clock at least, so they also increase after the
    storage was restored from a backup.

    Args:
        store: Storage of the reserved numbers. None: only the clock.
        now: Current time in seconds since 1970. None: read the clock.
    """

    def __init__(self, store: CounterStore | None = None, now: float | None = None) -> None:
        self._store = store
        self._lock = threading.Lock()
        clock = int((time.time() if now is None else now) * 1_000_000)
        self._next = self._end = max(store.number() if store else 0, clock)

    def next(self, count: int = 1) -> int:
        """Reserve ``count`` consecutive numbers and return the first. May write to the storage."""
        with self._lock:
            if self._next + count > self._end:
                self._end = self._next + count + _BLOCK
                if self._store is not None:
                    self._store.keep_number(self._end)
            number = self._next
            self._next += count
            return number


class MessageSigner:
    """Signer of the messages of one server or device. Thread-safe.

    Args:
        keys: Key pair that signs.
        numbers: Source of sequence numbers.
    """

    def __init__(self, keys: KeyPair, numbers: MessageCounter) -> None:
        self.keys = keys
        self.numbers = numbers

    def seal(self, topic: str, message: Message, at: int | None = None) -> bytes:
        """Return the encoded and signed message.

        Args:
            topic: MQTT topic on which the message is valid.
            message: Message to sign.
            at: Sequence number reserved earlier. None: take the next one.
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
"""Function that encodes a message for publishing on a topic, signed or not."""


def unsigned(topic: str, message: Message) -> bytes:
    """Return an encoded message without a signature. A reader that knows a key of the sender ignores such a message.

    ``topic`` is not used; the signature of this function equals that of :meth:`MessageSigner.seal`.
    """
    return encode(message)
