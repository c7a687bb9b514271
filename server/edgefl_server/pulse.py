"""When the coordinator looks at all of its devices: by its deadlines, and not for each message of a flood.

What such a look costs grows with the number of devices. So the time of the next deadline is found out once for each state,
and hellos that come one after the other are only noted, and looked at together.
"""

from __future__ import annotations

import time

from edgefl_server.coordinator import machine as coordinator
from edgefl_server.coordinator.states import Rules, State

_TOGETHER_S = 0.05
"""Between two looks while messages come one after the other."""


class Chores:
    """What is done by time, and need not be thought of for each message of a flood."""

    def __init__(self) -> None:
        self._done = 0.0

    def due(self) -> bool:
        """Whether it is time again; if so, it is not for a while."""
        now = time.monotonic()
        due = now - self._done >= _TOGETHER_S
        if due:
            self._done = now
        return due


class Pulse:
    """Times are those of the service's clock."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._known: State | None = None
        self._wake: float | None = None
        self._looked = 0.0
        self._noted = False

    def wake_at(self, state: State, now: float) -> float | None:
        """When a Tick may change something; None if only messages can."""
        if self._noted:
            return now
        if state is not self._known:
            self._known, self._wake = state, coordinator.wake_at(self._rules, state, now)
        return self._wake

    def due(self, state: State, now: float, *, quiet: bool) -> bool:
        """Whether it is time for a Tick, whatever else waits. ``quiet``: nothing does."""
        if now < self._looked + _TOGETHER_S and not quiet:
            return False
        if self._noted:
            return True
        wake = self.wake_at(state, now)
        return wake is not None and wake <= now and now >= self._looked + _TOGETHER_S

    def settles(self, now: float, *, at_once: bool) -> bool:
        """Whether the event at hand is to have its consequences now, or is noted."""
        settle = at_once or now >= self._looked + _TOGETHER_S
        self._noted = not settle
        if settle:
            self._looked, self._known = now, None
        return settle
