"""Updates for thousands of devices out of one: what all devices of a tier send alike is made, and hashed, once.

The protocol lets the keys of a message come in any order. So an update begins with what is the same for all and ends with
what is a device's own, and SHA-256, which works from front to back, starts for each device where the common part ends. A
thousand updates of a megabyte cost one of them, and a signature for each chunk.
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
    Profile,
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
"""Of the numbers that are sent: no aggregate of them overflows, and none is suspicious."""


def values_of(manifest: Manifest, seed: int) -> bytes:
    """The tensors of an update of the bundle, with random numbers in them: safetensors bytes.

    ConfigError for a codec that sends masks: how many entries each of them keeps stands in no manifest.
    """
    rng = np.random.default_rng(seed)
    arrays: Arrays = {}
    for port in manifest.graph(manifest.finish).outputs_of("update"):
        if port.mask:
            raise ConfigError(
                f"tier {manifest.tier!r} sends updates by codec {manifest.codec!r}, with a mask in them, which the "
                "generator cannot make: measure with another codec",
                codec=manifest.codec,
            )
        arrays[port.label] = _numbers(rng, port.dtype, port.shape)
    return tensors.dump(arrays)


def _numbers(rng: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Floats from 0 on, so that they pass for scales and variances; of codes any bits; of other whole numbers zeros."""
    if dtype == "uint8":
        return rng.integers(0, 256, shape, np.uint8)
    if np.dtype(dtype).kind == "f":
        return (rng.random(shape, np.float32) * np.float32(_LARGEST)).astype(dtype)
    return np.zeros(shape, dtype)


@dataclass(frozen=True)
class Piece:
    """The part of a chunk's data that all devices of a tier send alike, and the hash of the chunk so far."""

    head: bytes
    common: memoryview
    begun: _Hash


@dataclass(frozen=True)
class Chunk:
    """One chunk as it is signed: the encoded UpdateChunk in pieces, and its SHA-256."""

    body: tuple[Buffer, ...]
    digest: bytes


@dataclass(frozen=True)
class Outgoing:
    """A device's update, ready to be cut into chunks."""

    round: int
    nonce: str
    sha256: str
    size: int
    template: Template = field(repr=False)
    own: bytes = field(repr=False)

    @property
    def count(self) -> int:
        return -(-self.size // self.template.room)

    def chunk(self, index: int) -> Chunk:
        return self.template.chunk(self, index)


class Template:
    """The updates of one tier in one round, in chunks of ``room`` bytes and a shorter last one."""

    def __init__(self, common: bytes, room: int, run: str, round: int) -> None:
        self.room = room
        self.run, self.round = run, round
        self._common = memoryview(common)
        self._begun = hashlib.sha256(common)
        self._pieces: dict[tuple[int, int], Piece] = {}

    @classmethod
    def of(
        cls, manifest: Manifest, values: bytes, announced: Round, task: Task, chunk_bytes: int
    ) -> Template:
        """Of devices that took this task in the announced round."""
        common = {
            "tensors": values,
            "v": VERSION,
            "run": task.run,
            "round": task.round,
            "tier": task.tier,
            "model_version": announced.model_version,
            "metrics": {"loss": 1.0},
            "profile": Profile(
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

    def update(self, device: str, task: Task, samples: int) -> Outgoing:
        """A device's own one."""
        own = _rest({"nonce": task.nonce, "samples": samples, "device": device})
        whole = self._begun.copy()
        whole.update(own)
        size = len(self._common) + len(own)
        return Outgoing(task.round, task.nonce, whole.hexdigest(), size, self, own)

    def chunk(self, outgoing: Outgoing, index: int) -> Chunk:
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
        return Chunk((piece.head, piece.common, own), digest.digest())

    def _prepare(self, index: int, first: int, end: int, size: int) -> Piece:
        head = (
            bytes((_FIXMAP | _CHUNK_FIELDS,)) + _encoder.encode("data") + _BYTES + (end - first).to_bytes(4)
        )
        common = self._common[first:end]
        begun = hashlib.sha256(head)
        begun.update(common)
        piece = self._pieces[index, size] = Piece(head, common, begun)
        return piece


def garbage(outgoing: Outgoing, rubbish: bytes) -> Outgoing:
    """An update that is well cut and signed, and no update: ``rubbish`` in place of the device's own part."""
    whole = hashlib.sha256(rubbish)
    template = Template(b"", outgoing.template.room, outgoing.template.run, outgoing.round)
    return Outgoing(outgoing.round, outgoing.nonce, whole.hexdigest(), len(rubbish), template, rubbish)


def _opened(fields: int, first: dict[str, object]) -> bytes:
    """A MessagePack map of so many fields, up to those that follow ``first``."""
    return bytes((_FIXMAP | fields,)) + _rest(first)


def _rest(fields: dict[str, object]) -> bytes:
    """Keys and values of a map, without its head."""
    return _encoder.encode(fields)[1:]


_EMPTY = len(_encoder.encode(b""))


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
