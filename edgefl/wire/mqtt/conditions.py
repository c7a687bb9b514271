"""In what conditions a device is: its power, its link, how hot it is, and whether its owner lets it train now.

A part of :class:`edgefl.wire.mqtt.messages.Hello`. A device's own word, on which nothing but its selection depends.
"""

from __future__ import annotations

from functools import cache

import msgspec

POWER = ("battery", "charging")
LINK = ("metered", "unmetered")
THERMAL = ("cool", "warm", "hot")
"""Words that are understood, of heat from the least on. ``charging``: power that does not run out, with or without a
battery; ``hot``: the processor is slowed down, or soon will be."""


class Conditions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What nobody knows is empty, or None."""

    power: str = ""
    link: str = ""
    thermal: str = ""
    available: bool | None = None


UNKNOWN = Conditions()


def understood(conditions: Conditions) -> Conditions:
    """The same, in which words of another release, or of a device that makes some up, are unknown.

    Equal ones are the same object: a fleet has few.
    """
    return _shared(
        conditions.power if conditions.power in POWER else "",
        conditions.link if conditions.link in LINK else "",
        conditions.thermal if conditions.thermal in THERMAL else "",
        conditions.available,
    )


@cache
def _shared(power: str, link: str, thermal: str, available: bool | None) -> Conditions:
    return Conditions(power=power, link=link, thermal=thermal, available=available)
