"""Times of day: as lines for people begin with them, and for deadlines."""

from __future__ import annotations

import time


def clock(when: float) -> str:
    """Local time of day of ``when`` (epoch seconds), ``HH:MM:SS``."""
    return time.strftime("%H:%M:%S", time.localtime(when))


class SteadyClock:
    """Epoch seconds that pass as seconds do: the time of day when it was made, and what has passed since. A time of day that
    is set anew, by a person or by NTP, moves no deadline."""

    def __init__(self) -> None:
        self._began = time.time() - time.monotonic()

    def __call__(self) -> float:
        return self._began + time.monotonic()
