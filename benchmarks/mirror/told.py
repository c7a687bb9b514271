"""What the processes of this bench are told and tell, as a line of JSON each."""

from __future__ import annotations

import sys
from typing import Literal

import msgspec

FEDERATION = "bench-mirror"
Way = Literal["broker", "mirror"]


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """One way of ``nbytes`` in units of ``unit_bytes``; ``mirror`` is a URL, or empty, and ``folder`` what it serves."""

    way: Way
    port: int
    nbytes: int
    unit_bytes: int
    folder: str
    mirror: str = ""

    @property
    def units(self) -> list[int]:
        """Bytes of each unit."""
        whole, rest = divmod(self.nbytes, self.unit_bytes)
        return [self.unit_bytes] * whole + ([rest] if rest else [])


class Published(msgspec.Struct, frozen=True, kw_only=True):
    """The server has said all, ``seconds`` after it began; the announcement's message and its page have so many bytes."""

    seconds: float
    message_bytes: int
    page_bytes: int


class Fetched(msgspec.Struct, frozen=True, kw_only=True):
    """The device has read all, ``seconds`` after it heard of it, so much of it from the broker and from the mirror."""

    seconds: float
    broker_bytes: int
    mirror_bytes: int
    peak_bytes: int


def tell(what: Published | Fetched) -> None:
    sys.stdout.write(msgspec.json.encode(what).decode() + "\n")
    sys.stdout.flush()
