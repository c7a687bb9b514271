"""Fuzzed messages: genuine messages of a federation with changes, for one side of the connection."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec

from edgefl.errors import ProtocolError
from edgefl.wire.keys import KeyPair
from edgefl.wire.mqtt.envelope import SIGNED, Envelope, signed_text, unwrap
from edgefl.wire.mqtt.messages import (
    Ack,
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
)
from edgefl.wire.mqtt.topics import Topics

_NONCE = "0123456789abcdef"
_MOST = 400
_AS_HEARD, _BARE = 0.4, 0.7
"""Of 10 messages 4 keep their envelope, 3 have none, and 3 are signed by an unknown key."""
_KINDS: dict[str, type[Message]] = {
    "status": Status,
    "hello": Hello,
    "progress": Progress,
    "declines": Decline,
    "tasks": Task,
    "acks": Ack,
    "current": Round,
}


def further_messages() -> list[Message]:
    """Return messages of kinds that an undisturbed round may not send."""
    progress = Progress(
        round=1,
        tier="all",
        stage="train",
        step=1,
        steps=2,
        loss=0.5,
        step_ms=1,
        peak_bytes=1,
        down_bytes=1,
        up_bytes=1,
    )
    return [
        Ack(round=1, nonce=_NONCE, status="missing", missing=[0, 1]),
        Ack(round=1, nonce=_NONCE, status="rejected", reason="stale", text="too late"),
        Decline(round=1, nonce=_NONCE, reason="no-memory", text="too large"),
        Hello(agent="edgefl/0", memory_bytes=1 << 30, cores=1, samples=10, engines={"onnxruntime": "1"}),
        Status(online=False),
        progress,
    ]


@dataclass(frozen=True)
class Fuzzer:
    """Generator of messages, (topic, payload), for one side of the federation ``name``.

    It changes genuine messages, ``heard``, in their envelope, without it, or signed by ``keys``, which is unknown. It never
    sends a valid hello of a new device, which could join a federation without a list of devices.
    """

    name: str
    keys: KeyPair
    heard: tuple[tuple[str, bytes], ...]

    @classmethod
    def of(cls, name: str, keys: KeyPair, heard: Iterable[tuple[str, bytes]], newest: int) -> Fuzzer:
        """Return a fuzzer with the last messages among ``heard`` of rounds up to ``newest``."""
        old = [pair for pair in heard if _round_of(*pair) <= newest]
        return cls(name, keys, tuple(old[-_MOST:]))

    @cached_property
    def _of_devices(self) -> list[tuple[str, bytes]]:
        return [pair for pair in self.heard if "/devices/" in pair[0]]

    @cached_property
    def _chunks(self) -> list[str]:
        root = Topics(self.name).root
        return [topic for topic, _ in self.heard if "/blobs/" in topic] or [f"{root}/blobs/{'0' * 64}/0"]

    def to_server(self, rng: random.Random) -> tuple[str, bytes]:
        """Return a message of a stranger to the server, under its own name or one of honest devices."""
        topic, payload, signs = self._draw(rng, self._of_devices)
        root = Topics(self.name).root
        joins = _reads(Hello, payload)
        if rng.random() < 0.3:
            stray = random_topic(rng, root)
            return self._signed(f"{stray}/x" if joins else stray, payload, signs)
        device, _, leaf = topic.partition("/devices/")[2].partition("/")
        if rng.random() < 0.5:
            device = f"fuzz-{rng.randrange(10_000)}"
        if leaf == "hello" and joins and device.startswith("fuzz-"):
            leaf = "progress"
        return self._signed(f"{root}/devices/{device}/{leaf}", payload, signs)

    def to_device(self, rng: random.Random, device: str) -> tuple[str, bytes]:
        """Return a message of a false server to ``device``."""
        topics = Topics(self.name)
        mine = topics.device(device)
        _, payload, signs = self._draw(rng, self.heard)
        topic = rng.choice(
            (mine.tasks, mine.acks, mine.profile_requests, topics.current_round, rng.choice(self._chunks))
        )
        return self._signed(topic, payload, signs)

    def _draw(self, rng: random.Random, heard: Sequence[tuple[str, bytes]]) -> tuple[str, bytes, bool]:
        """Draw a topic, a payload, and whether to sign it."""
        topic, payload = rng.choice(heard)
        draw = rng.random()
        if draw > _AS_HEARD:
            payload = body_of(payload)
        if rng.random() < 0.2:
            payload = encode(rng.choice(further_messages()))
        return topic, mutated(rng, payload, [rng.choice(heard)[1]]), draw > _BARE

    def _signed(self, topic: str, payload: bytes, signs: bool) -> tuple[str, bytes]:
        if not signs:
            return topic, payload
        kind = _KINDS.get(topic.rpartition("/")[2], UpdateChunk)
        signature = self.keys.sign(signed_text(kind, topic, 1 << 50, payload))
        envelope = Envelope(v=SIGNED, key=self.keys.public, at=1 << 50, signature=signature, body=payload)
        return topic, msgspec.msgpack.encode(envelope)


def body_of(payload: bytes) -> bytes:
    """Return a message without its envelope, if it has one."""
    with suppress(ProtocolError):
        envelope = unwrap(payload)
        return payload if envelope is None else envelope.body
    return payload


def _round_of(topic: str, payload: bytes) -> int:
    """Return the round of a genuine message; 0 for none."""
    _, found, rest = topic.partition("/updates/")
    if found:
        return int(rest.partition("/")[0])
    try:
        fields = msgspec.msgpack.decode(body_of(payload))
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return 0
    number = fields.get("round", 0) if isinstance(fields, dict) else 0
    return number if isinstance(number, int) else 0


def _reads(kind: type[Message], payload: bytes) -> bool:
    try:
        decode(kind, payload)
    except ProtocolError:
        return False
    return True


MOST_BYTES = 1 << 16
"""Longest mutated message: more bytes test nothing new."""

_HOSTILE: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 2**31, 2**53, 2**63, 2**64 - 1, -(2**63)),
    *(0.5, float("nan"), float("inf"), -0.0, 1e308),
    *("", "\x00", "../../etc/passwd", "\x1b[2J", "\u202e", "reported", "a" * 5000, b"", b"\xff" * 300),
    *([], {}, [[]], {"": {}}, [0] * 2000, {"v": 1}),
)
_NAMES = ("", "#", "..", "é", "fuzz-1", "fuzz-2", "fuzz-3", "a" * 63, "a" * 64, "a/b", "server", "$SYS")
_LEAVES = (
    "status",
    "hello",
    "progress",
    "tasks",
    "acks",
    "declines",
    "updates",
    "profiles",
    "profile-requests",
    "",
)
_NUMBERS = ("0", "1", "-1", "007", "99999999999999999999", "2147483648", "1e3", "x", "", "\u0663")


def mutated(rng: random.Random, payload: bytes, others: Sequence[bytes]) -> bytes:
    """Return ``payload`` after one to three mutations, with parts of ``others`` among them."""
    for _ in range(rng.randint(1, 3)):
        payload = rng.choice(_MUTATIONS)(rng, payload, others)
    return payload[:MOST_BYTES]


def random_topic(rng: random.Random, root: str) -> str:
    """Return a topic of the federation at ``root``, or almost one.

    It has no wildcards or control characters, because a broker closes the connection of their sender.
    """
    parts = [root, "devices", rng.choice(_NAMES), rng.choice(_LEAVES)]
    parts += [rng.choice(_NUMBERS) for _ in range(rng.choice((0, 0, 1, 2, 3)))]
    if rng.random() < 0.2:
        rng.shuffle(parts)
    if rng.random() < 0.2:
        del parts[rng.randrange(len(parts))]
    return "/".join(parts).replace("#", "%").replace("+", "%").replace("\x00", "%") or "%"


def _flip(rng: random.Random, data: bytes, _others: Sequence[bytes]) -> bytes:
    if not data:
        return b"\x00"
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _cut(rng: random.Random, data: bytes, _: Sequence[bytes]) -> bytes:
    return data[: rng.randint(0, len(data))]


def _insert(rng: random.Random, data: bytes, _: Sequence[bytes]) -> bytes:
    at = rng.randint(0, len(data))
    return data[:at] + rng.randbytes(rng.choice((1, 4, 64, 1000))) + data[at:]


def _splice(rng: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    other = rng.choice(others)
    return data[: rng.randint(0, len(data))] + other[rng.randint(0, len(other)) :]


def _deep(rng: random.Random, _data: bytes, _others: Sequence[bytes]) -> bytes:
    return rng.choice((b"\x91", b"\x81\xa1v")) * rng.choice((10, 1000, 20_000)) + b"\x01"


def _field(rng: random.Random, data: bytes, _: Sequence[bytes]) -> bytes:
    """Replace, add or remove one field of a map."""
    try:
        fields = msgspec.msgpack.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return data
    if not isinstance(fields, dict) or not fields:
        return data
    name, value = rng.choice(list(fields)), rng.choice(_HOSTILE)
    match rng.randrange(4):
        case 0:
            del fields[name]
        case 1:
            fields[f"{name}x"] = value
        case 2 if isinstance(fields[name], dict) and fields[name]:
            fields[name] = {**fields[name], rng.choice(list(fields[name])): value}
        case _:
            fields[name] = value
    try:
        return msgspec.msgpack.encode(fields)
    except (msgspec.MsgspecError, OverflowError, RecursionError):
        return data


_MUTATIONS: tuple[Callable[[random.Random, bytes, Sequence[bytes]], bytes], ...] = (
    *(_flip, _cut, _insert, _splice, _deep),
    *(_field, _field, _field, _field),
)
