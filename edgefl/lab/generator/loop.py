"""One thread that waits for all sockets at once, and for moments in time."""

from __future__ import annotations

import heapq
import itertools
import selectors
import time
from collections.abc import Callable
from typing import Protocol

READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE
_LONGEST_WAIT_S = 1.0


class HasFileno(Protocol):
    def fileno(self) -> int: ...


class Timer:
    """Something that is to happen later; :meth:`cancel` it as often as you like."""

    __slots__ = ("call",)

    def __init__(self, call: Callable[[], None]) -> None:
        self.call: Callable[[], None] | None = call

    def cancel(self) -> None:
        self.call = None


class Loop:
    """Calls whoever has something to read or to write, and timers. Times are of the monotonic clock."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._timers: list[tuple[float, int, Timer]] = []
        self._order = itertools.count()
        self._running = False

    def watch(self, file: HasFileno, events: int, ready: Callable[[int], None]) -> None:
        self._selector.register(file, events, ready)

    def change(self, file: HasFileno, events: int, ready: Callable[[int], None]) -> None:
        self._selector.modify(file, events, ready)

    def forget(self, file: HasFileno) -> None:
        self._selector.unregister(file)

    def later(self, seconds: float, call: Callable[[], None]) -> Timer:
        timer = Timer(call)
        heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._order), timer))
        return timer

    def run(self) -> None:
        """Until :meth:`stop`."""
        self._running = True
        while self._running:
            for key, events in self._selector.select(self._ring()):
                key.data(events)

    def stop(self) -> None:
        self._running = False

    def close(self) -> None:
        self._selector.close()

    def _ring(self) -> float:
        """Call the timers that are due; how long nothing else is."""
        timers, now = self._timers, time.monotonic()
        while timers and (timers[0][0] <= now or timers[0][2].call is None):
            call = heapq.heappop(timers)[2].call
            if call is not None:
                call()
        if not self._running:
            return 0.0
        return min(_LONGEST_WAIT_S, max(0.0, timers[0][0] - time.monotonic())) if timers else _LONGEST_WAIT_S
