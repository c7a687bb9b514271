"""What the server tells of floods and full disks: now and then, however often they are met."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from edgefl.wire.errors import StoreError
from server import events

_TOLD_AGAIN_S = 60.0


class LoadNews:
    """Times are those of the service's clock."""

    def __init__(self, notice_s: float, emit: Callable[[events.Event], None]) -> None:
        self._notice_s = notice_s
        self._emit = emit
        self._counts: Mapping[str, int] = {}
        self._next = 0.0
        self._trouble = ("", 0.0)

    def step(self, counts: Mapping[str, int], now: float) -> float | None:
        """Tell ``counts`` of messages turned away, if there are more and it is time. Seconds until it is; None if there is
        nothing to tell."""
        if counts == self._counts:
            return None
        if now < self._next:
            return self._next - now
        self._counts, self._next = counts, now + self._notice_s
        self._emit(events.Limited(counts=dict(counts)))
        return None

    def troubled(self, error: StoreError, now: float) -> None:
        """The disk is full, or its like: told once for as long as it stays so, as it is tried again and again."""
        text, at = self._trouble
        if error.message == text and now - at < _TOLD_AGAIN_S:
            return
        self._trouble = error.message, now
        text = f"{error.message}; nothing is acknowledged that is not written, and the server tries again"
        self._emit(events.Warned(tier="", text=text))
