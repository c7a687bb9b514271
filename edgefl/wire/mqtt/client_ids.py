"""Client ids: one for each role of each name in each federation, which no other client can guess.

If a second client connects with the same id, a broker takes it for the first one and ends the first connection. Most brokers
do not check whose id it is, so a client with credentials of its own could keep any other out whose id it can guess.
"""

from __future__ import annotations

import hashlib
import hmac
import string
from typing import Literal

ClientIds = Literal["full", "short"]
"""short: 23 letters and digits that only their owner can compute; every broker has to take them (MQTT 3.1.1, 3.1.3.1). full:
readable, at most 128 bytes; only for a broker that lets no user connect with the id of another."""

Role = Literal["device", "guest", "look", "server", "look-server", "profiler", "worker"]

MOST_FULL, MOST_SHORT = 128, 23
_DIGITS = string.digits + string.ascii_letters
_LONG_DIGEST = 43


def client_id(
    secret: bytes, role: Role, federation: str, name: str = "", *, style: ClientIds = "short"
) -> str:
    """Return the client id of a role.

    Args:
        secret: Of the process that connects, 32 bytes or more: the ``client_secret`` of its keys if the id must be the same
            at the next start, random bytes for a session that is not resumed. A full id does not depend on it.
        role: What connects.
        federation: Name of the federation.
        name: Name of the device, the worker or the request.
        style: ``short`` for 23 of 62 digits (137 bits of an HMAC); ``full`` for ``edgefl:ROLE:FEDERATION:NAME``, or a
            digest of it if that is longer than 128 bytes. Names hold no colon and no equals sign, so no two full ids are
            equal.
    """
    whole = ":".join(("edgefl", role, federation, *([name] if name else ())))
    if style == "short":
        return _letters(hmac.digest(secret, whole.encode(), "sha256"), MOST_SHORT)
    if len(whole) <= MOST_FULL:
        return whole
    return f"edgefl:{role}={_letters(hashlib.sha256(whole.encode()).digest(), _LONG_DIGEST)}"


def _letters(digest: bytes, digits: int) -> str:
    number = int.from_bytes(digest)
    found = ""
    for _ in range(digits):
        number, digit = divmod(number, len(_DIGITS))
        found += _DIGITS[digit]
    return found
