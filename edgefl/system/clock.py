"""Times of day, as lines for people begin with them, and as deadlines need them."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Source of the time in seconds. Tests pass one that they set themselves."""

    def __call__(self) -> float: ...


def clock(when: float) -> str:
    """Local time of day of ``when`` (epoch seconds), ``HH:MM:SS``."""
    return time.strftime("%H:%M:%S", time.localtime(when))


_STARTED = time.time() - time.monotonic()


def steady_time() -> float:
    """Seconds since the epoch that never jump: by the wall clock of the process's start, and what has passed since.

    Whoever sets the wall clock of a running server must not end its rounds, nor keep them open for a day.
    """
    return _STARTED + time.monotonic()
