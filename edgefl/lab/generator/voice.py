"""What a generated device signs, with a key made of the fleet's seed and its name: the same at the next start, no file."""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Sequence

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from edgefl.wire.mqtt.envelope import SIGNED, Envelope, signed_text, text_of_digest
from edgefl.wire.mqtt.messages import Message, UpdateChunk, encode

Buffer = bytes | memoryview
_encoder = msgspec.msgpack.Encoder()
_EMPTY = len(_encoder.encode(b""))
_BYTES = b"\xc6"  # MessagePack: bytes, behind their length in four bytes


class Voice:
    """Signs a device's messages. Anybody who knows seed and name can make the key: these are no devices."""

    __slots__ = ("_key", "_numbers", "public")

    def __init__(self, seed: str, name: str) -> None:
        secret = hashlib.sha256(f"edgefl/load/{seed}/{name}".encode()).digest()
        self._key = Ed25519PrivateKey.from_private_bytes(secret)
        self.public = self._key.public_key().public_bytes_raw()
        self._numbers = itertools.count(int(time.time() * 1_000_000))

    def next(self) -> int:
        """A number above all before, also above those of an earlier process."""
        return next(self._numbers)

    def seal(self, topic: str, message: Message, at: int | None = None) -> bytes:
        """The payload for ``topic``."""
        body = encode(message)
        number = self.next() if at is None else at
        signature = self._key.sign(signed_text(type(message), topic, number, body))
        return _encoder.encode(Envelope(v=SIGNED, key=self.public, at=number, signature=signature, body=body))

    def seal_chunk(self, topic: str, body: Sequence[Buffer], digest: bytes) -> list[Buffer]:
        """The payload of an UpdateChunk whose encoded bytes are ``body``, in pieces that are not copied."""
        number = self.next()
        signature = self._key.sign(text_of_digest(UpdateChunk, topic, number, digest))
        empty = _encoder.encode(Envelope(v=SIGNED, key=self.public, at=number, signature=signature, body=b""))
        size = sum(map(len, body))
        return [empty[:-_EMPTY] + _BYTES + size.to_bytes(4), *body]
