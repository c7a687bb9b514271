"""Sends the details of a decline, which may hold paths and values of the data."""

from __future__ import annotations

import msgspec

from edgefl.wire.mqtt.messages import Decline
from edgefl_device.round import desk


def plant() -> None:
    def sent(self: desk.RoundDesk, past: desk.PastRound) -> None:
        decline = Decline(round=past.round, nonce=past.nonce, reason=past.reason)
        self.send(msgspec.structs.replace(decline, text=past.text))

    desk.RoundDesk._send_decline = sent  # type: ignore[method-assign]
