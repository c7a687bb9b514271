"""Parsing of sizes, rates and budgets in text, and sizes as text.

A size is a number and a unit, with or without a space, in any case: ``67108864B``, ``64M``, ``64 MiB``, ``1.5GB``. K,
M and G are KiB, MiB and GiB (powers of 1024); KB, MB and GB are powers of 1000. A number without a unit is refused,
because most people who write 64 mean MiB.
"""

from __future__ import annotations

import math
import re

KIB, MIB, GIB = 2**10, 2**20, 2**30

_UNITS = {"B": 1, "K": KIB, "KIB": KIB, "KB": 10**3, "M": MIB, "MIB": MIB, "MB": 10**6}
_UNITS |= {"G": GIB, "GIB": GIB, "GB": 10**9}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([KMG]I?B?|B|)", re.IGNORECASE | re.ASCII)
_RATE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([kKMG]?)(i?)(B|bit)/s")  # b would be bits to some
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3}
_SHARE = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*%", re.ASCII)
_MOST = 2**60
_BUDGET = "a memory budget is a size such as 48MiB or a share such as 50%"


def parse_size(text: str) -> int:
    """Return the bytes of a size such as ``64MiB``, ``64M`` (MiB) or ``1.5 GB`` (powers of 1000), rounded down.

    Raises:
        ValueError: If the text is no size, has no unit, or is more than 2^60 bytes.
    """
    match = _SIZE.fullmatch(text.strip())
    if match and not match[2]:
        raise ValueError(f"{text!r} has no unit; write {match[1]}MiB, or {match[1]}B for bytes")
    count = float(match[1]) * _UNITS[match[2].upper()] if match else math.inf
    if count > _MOST:
        raise ValueError(f"{text!r} is not a size; write 512KiB, 64MiB, 64M or 1GB")
    return int(count)


def parse_rate(text: str) -> float:
    """Return the bytes per second of a text such as ``1MB/s``, ``200 kB/s``, ``1MiB/s`` or ``8Mbit/s``.

    Raises:
        ValueError: The text is no rate, or zero.
    """
    match = _RATE.fullmatch(text.strip())
    if match is None or float(match[1]) <= 0:
        raise ValueError(f"a link is a rate such as 1MB/s or 8Mbit/s, found {text!r}")
    unit = float((1024 if match[3] else 1000) ** _POWERS[match[2].upper()])
    return float(match[1]) * unit / (8 if match[4] == "bit" else 1)


def parse_budget(text: str) -> tuple[float, bool]:
    """Return a memory budget as (bytes, False), or as (share from 0 to 1, True) for a text such as ``50%``.

    Raises:
        ValueError: If the text is neither a size nor a share, or is zero.
    """
    share = _SHARE.fullmatch(text.strip())
    try:
        amount = float(share[1]) / 100 if share else float(parse_size(text))
    except ValueError as error:
        raise ValueError(f"{error}; {_BUDGET}") from error
    if amount <= 0:
        raise ValueError(f"{text!r} is nothing; {_BUDGET}")
    return amount, share is not None


def mib(count: float) -> str:
    """Return a number of bytes as text in MiB without the unit, such as ``"64.0"``, for columns whose title has it."""
    return f"{count / MIB:.1f}"


def mebibytes(count: float) -> str:
    """Return a number of bytes as text in MiB, such as ``"64.0 MiB"``."""
    return f"{mib(count)} MiB"


def mebibytes_up(count: float) -> str:
    """Return a number of bytes as text in MiB, rounded up: a user who requests the shown size gets enough."""
    return mebibytes(math.ceil(count / MIB * 10) / 10 * MIB)


def size(count: float) -> str:
    """Return a number of bytes as text, such as ``"1.5 MiB"``; in KiB below 1 MiB."""
    return mebibytes(count) if count >= MIB else f"{count / KIB:.1f} KiB"
