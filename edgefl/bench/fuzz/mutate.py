"""Genuine messages made wrong, from a seed: bits and bytes, fields and values, topics."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

MOST_BYTES = 1 << 16
"""Of a mutated message: more of the same shows nothing new."""

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
    """``payload`` after one to three mutations; ``others`` are messages whose parts may get in."""
    for _ in range(rng.randint(1, 3)):
        payload = rng.choice(_MUTATIONS)(rng, payload, others)
    return payload[:MOST_BYTES]


def random_topic(rng: random.Random, root: str) -> str:
    """A topic of the federation at ``root``, or almost one; never one with wildcards or control characters: a broker ends
    the connection of whoever sends them."""
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
    """A map with one value replaced, one field too many or one too few."""
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
