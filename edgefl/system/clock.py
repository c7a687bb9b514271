"""Times of day as text for logs, and a steady clock for deadlines."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Interface of a function without arguments that returns the time in seconds. Tests pass one that they control."""

    def __call__(self) -> float: ...


def clock(when: float) -> str:
    """Return the local time of day of ``when`` (seconds since the epoch) as ``HH:MM:SS``."""
    return time.strftime("%H:%M:%S", time.localtime(when))


_STARTED = time.time() - time.monotonic()


def steady_time() -> float:
    """Return seconds since the epoch that never jump: the wall clock at the start of the process plus the elapsed time.

    A change of the wall clock of a running server must neither end its rounds nor keep them open for a day.
    """
    return _STARTED + time.monotonic()
