"""Client ids: one for each role of each name in each federation, and no two alike.

A broker takes a second client with an id for the first one come back, so two that collide end each other's connections.
"""

from __future__ import annotations

import hashlib
import string
from typing import Literal

ClientIds = Literal["full", "short"]
"""full: readable, at most 128 bytes. short: 23 letters and digits, which every broker has to take (MQTT 3.1.1, 3.1.3.1)."""

Role = Literal["device", "guest", "look", "server", "look-server", "profiler", "worker"]

MOST_FULL, MOST_SHORT = 128, 23
_DIGITS = string.digits + string.ascii_letters
_LONG_DIGEST = 43


def client_id(role: Role, federation: str, name: str = "", *, style: ClientIds = "full") -> str:
    """``edgefl:ROLE:FEDERATION:NAME``; a digest of it where that is longer than 128 bytes, or ``short`` ones are wanted.

    Names hold neither colons nor equals signs (:func:`edgefl.wire.mqtt.topics.checked_name`), so the readable form can be
    read in one way only and is no other's digest. A short id has 23 of 62 digits, 137 bits of SHA-256.
    """
    whole = ":".join(("edgefl", role, federation, *([name] if name else ())))
    if style == "short":
        return _digest(whole, MOST_SHORT)
    return whole if len(whole) <= MOST_FULL else f"edgefl:{role}={_digest(whole, _LONG_DIGEST)}"


def _digest(text: str, digits: int) -> str:
    number = int.from_bytes(hashlib.sha256(text.encode()).digest())
    found = ""
    for _ in range(digits):
        number, digit = divmod(number, len(_DIGITS))
        found += _DIGITS[digit]
    return found
