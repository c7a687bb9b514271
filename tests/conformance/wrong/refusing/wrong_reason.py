"""Has one reason for whatever it declines."""

from __future__ import annotations

from edgefl.errors import RoundDeclined
from edgefl_device.round import desk

_decline = desk.RoundDesk._decline


def plant() -> None:
    def failed(self: desk.RoundDesk, job: object, declined: RoundDeclined) -> None:
        _decline(self, job, RoundDeclined("failed", declined.message))  # type: ignore[arg-type]

    desk.RoundDesk._decline = failed  # type: ignore[method-assign, assignment]
