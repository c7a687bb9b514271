"""Updates for thousands of devices: the part that all devices of a tier share is encoded and hashed once.

The protocol allows any order of a message's keys. So an update begins with the shared part and ends with the device's own
part. SHA-256 works from front to back, so each device continues the hash of the shared part. A thousand updates of a
megabyte cost as much as one, and a signature for each chunk.
"""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from edgefl.errors import ConfigError
from edgefl.wire import tensors
from edgefl.wire.bundle.manifest import Manifest
from edgefl.wire.mqtt.envelope import SIGNED, Envelope, signed_text, text_of_digest
from edgefl.wire.mqtt.messages import (
    ENVELOPE_BYTES,
    VERSION,
    Message,
    ResourceUsage,
    Round,
    Task,
    UpdateChunk,
    encode,
)
from edgefl.wire.tensors import Arrays

if TYPE_CHECKING:
    from hashlib import _Hash

Buffer = bytes | memoryview
_encoder = msgspec.msgpack.Encoder()
_UPDATE_FIELDS, _CHUNK_FIELDS, _FIXMAP = 13, 7, 0x80
_BYTES = b"\xc6"  # MessagePack: bytes, behind their length in four bytes
_LARGEST = 1e-2
"""Largest number in an update: no aggregate overflows, and no check rejects it."""


def values_of(manifest: Manifest, seed: int) -> bytes:
    """Return random tensors of an update of the bundle, as safetensors bytes.

    Raises:
        ConfigError: the codec sends masks, whose numbers of entries no manifest contains.
    """
    rng = np.random.default_rng(seed)
    arrays: Arrays = {}
    for port in manifest.graph(manifest.finish).outputs_of("update"):
        if port.mask:
            raise ConfigError(
                f"codec {manifest.codec!r} of tier {manifest.tier!r} sends masks, which the generator does not support; "
                "measure with another codec",
                codec=manifest.codec,
            )
        arrays[port.label] = _numbers(rng, port.dtype, port.shape)
    return tensors.dump(arrays)


def _numbers(rng: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Return floats of at least 0, valid as scales and variances, random codes, or zeros for other integers."""
    if dtype == "uint8":
        return rng.integers(0, 256, shape, np.uint8)
    if np.dtype(dtype).kind == "f":
        return (rng.random(shape, np.float32) * np.float32(_LARGEST)).astype(dtype)
    return np.zeros(shape, dtype)


@dataclass(frozen=True)
class SharedPart:
    """Part of a chunk's data that all devices of a tier share, and the hash of the chunk so far."""

    head: bytes
    common: memoryview
    begun: _Hash


@dataclass(frozen=True)
class SignedChunk:
    """Encoded UpdateChunk in pieces, and its SHA-256, which is signed."""

    body: tuple[Buffer, ...]
    digest: bytes


@dataclass(frozen=True)
class OutgoingUpdate:
    """Update of one device, which the template splits into chunks."""

    round: int
    nonce: str
    sha256: str
    size: int
    template: UpdateTemplate = field(repr=False)
    own: bytes = field(repr=False)

    @property
    def count(self) -> int:
        return -(-self.size // self.template.room)

    def chunk(self, index: int) -> SignedChunk:
        return self.template.chunk(self, index)


class UpdateTemplate:
    """Template of the updates of one tier in one round, in chunks of ``room`` bytes and a shorter last one."""

    def __init__(self, common: bytes, room: int, run: str, round: int) -> None:
        self.room = room
        self.run, self.round = run, round
        self._common = memoryview(common)
        self._begun = hashlib.sha256(common)
        self._pieces: dict[tuple[int, int], SharedPart] = {}

    @classmethod
    def of(
        cls, manifest: Manifest, values: bytes, announced: Round, task: Task, chunk_bytes: int
    ) -> UpdateTemplate:
        """Return the template for a task of the announced round."""
        common = {
            "tensors": values,
            "v": VERSION,
            "run": task.run,
            "round": task.round,
            "tier": task.tier,
            "model_version": announced.model_version,
            "metrics": {"loss": 1.0},
            "profile": ResourceUsage(
                step_ms=0,
                forward_ms=0,
                load_ms=0,
                idle_bytes=0,
                peak_bytes=0,
                down_bytes=0,
                down_wire_bytes=0,
            ),
            "codec": manifest.codec,
            "codec_version": manifest.codec_version,
        }
        room = max(chunk_bytes // 2, chunk_bytes - ENVELOPE_BYTES)
        return cls(_opened(_UPDATE_FIELDS, common), room, task.run, task.round)

    def update(self, device: str, task: Task, samples: int) -> OutgoingUpdate:
        """Return the update of one device."""
        own = _rest({"nonce": task.nonce, "samples": samples, "device": device})
        whole = self._begun.copy()
        whole.update(own)
        size = len(self._common) + len(own)
        return OutgoingUpdate(task.round, task.nonce, whole.hexdigest(), size, self, own)

    def chunk(self, outgoing: OutgoingUpdate, index: int) -> SignedChunk:
        first = index * self.room
        end = min(first + self.room, outgoing.size)
        piece = self._pieces.get((index, outgoing.size)) or self._prepare(index, first, end, outgoing.size)
        own = outgoing.own[max(0, first - len(self._common)) : max(0, end - len(self._common))]
        own += _rest(
            {
                "v": VERSION,
                "index": index,
                "count": outgoing.count,
                "size": outgoing.size,
                "nonce": outgoing.nonce,
                "sha256": outgoing.sha256,
            }
        )
        digest = piece.begun.copy()
        digest.update(own)
        return SignedChunk((piece.head, piece.common, own), digest.digest())

    def _prepare(self, index: int, first: int, end: int, size: int) -> SharedPart:
        head = (
            bytes((_FIXMAP | _CHUNK_FIELDS,)) + _encoder.encode("data") + _BYTES + (end - first).to_bytes(4)
        )
        common = self._common[first:end]
        begun = hashlib.sha256(head)
        begun.update(common)
        piece = self._pieces[index, size] = SharedPart(head, common, begun)
        return piece


def garbage(outgoing: OutgoingUpdate, rubbish: bytes) -> OutgoingUpdate:
    """Return an invalid update with valid chunks and signatures, whose bytes are ``rubbish``."""
    whole = hashlib.sha256(rubbish)
    template = UpdateTemplate(b"", outgoing.template.room, outgoing.template.run, outgoing.round)
    return OutgoingUpdate(outgoing.round, outgoing.nonce, whole.hexdigest(), len(rubbish), template, rubbish)


def _opened(fields: int, first: dict[str, object]) -> bytes:
    """Return the beginning of a MessagePack map of so many fields, with the ``first`` ones."""
    return bytes((_FIXMAP | fields,)) + _rest(first)


def _rest(fields: dict[str, object]) -> bytes:
    """Return keys and values of a MessagePack map, without its header."""
    return _encoder.encode(fields)[1:]


_EMPTY = len(_encoder.encode(b""))


class LoadSigner:
    """Signer of a device's messages. The key follows from seed and name, so it protects nothing."""

    __slots__ = ("_key", "_numbers", "public")

    def __init__(self, seed: str, name: str) -> None:
        secret = hashlib.sha256(f"edgefl/load/{seed}/{name}".encode()).digest()
        self._key = Ed25519PrivateKey.from_private_bytes(secret)
        self.public = self._key.public_key().public_bytes_raw()
        self._numbers = itertools.count(int(time.time() * 1_000_000))

    def next(self) -> int:
        """Return a message number above all earlier ones, those of earlier processes included."""
        return next(self._numbers)

    def seal(self, topic: str, message: Message, at: int | None = None) -> bytes:
        """Return the signed payload for ``topic``."""
        body = encode(message)
        number = self.next() if at is None else at
        signature = self._key.sign(signed_text(type(message), topic, number, body))
        return _encoder.encode(Envelope(v=SIGNED, key=self.public, at=number, signature=signature, body=body))

    def seal_chunk(self, topic: str, body: Sequence[Buffer], digest: bytes) -> list[Buffer]:
        """Return the signed payload of an UpdateChunk with the encoded bytes ``body``, without a copy."""
        number = self.next()
        signature = self._key.sign(text_of_digest(UpdateChunk, topic, number, digest))
        empty = _encoder.encode(Envelope(v=SIGNED, key=self.public, at=number, signature=signature, body=b""))
        size = sum(map(len, body))
        return [empty[:-_EMPTY] + _BYTES + size.to_bytes(4), *body]
