"""Why a device declines a round, as a server may repeat it: what a device writes is not to be trusted."""

from __future__ import annotations

import re

from edgefl.wire.mqtt.messages import NO_CARRY, Decline
from edgefl.wire.printable import printable
from server.coordinator.states import MOST_REASON

_REASON = re.compile(rf"[a-z0-9-]{{1,{MOST_REASON}}}")


def reason_of(decline: Decline, *, carry_needed: bool) -> tuple[str, str]:
    """The reason, ``other`` where it is no word of ours or cannot be, and the text, printable.

    ``carry_needed``: whether the device's bundle needs what earlier rounds leave on a device.
    """
    text = printable(decline.text)
    if not _REASON.fullmatch(decline.reason):
        return "other", text
    if decline.reason == NO_CARRY and not carry_needed:
        return "other", f"{text} (it says {NO_CARRY!r}, and nothing of the kind is needed)"
    return decline.reason, text
