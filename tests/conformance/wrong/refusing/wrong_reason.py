"""Has one reason for whatever it declines."""

from __future__ import annotations

from edgefl.errors import RoundDeclined
from edgefl_device.round import scheduler

_decline = scheduler.RoundScheduler._decline


def plant() -> None:
    def failed(self: scheduler.RoundScheduler, job: object, declined: RoundDeclined) -> object:
        return _decline(self, job, RoundDeclined("failed", declined.message))  # type: ignore[arg-type]

    scheduler.RoundScheduler._decline = failed  # type: ignore[method-assign, assignment]
