"""Times of day, as lines for people begin with them."""

from __future__ import annotations

import time


def clock(when: float) -> str:
    """Local time of day of ``when`` (epoch seconds), ``HH:MM:SS``."""
    return time.strftime("%H:%M:%S", time.localtime(when))
