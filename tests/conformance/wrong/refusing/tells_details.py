"""Sends the details of a decline, which may hold paths and values of the data."""

from __future__ import annotations

from edgefl.wire.mqtt.messages import Decline
from edgefl_device.round import scheduler
from edgefl_device.store.database import PastRound


def plant() -> None:
    def with_text(past: PastRound) -> Decline:
        return Decline(round=past.round, nonce=past.nonce, reason=past.reason, text=past.text)

    scheduler.decline_message = with_text
