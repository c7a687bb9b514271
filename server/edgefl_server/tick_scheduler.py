"""Schedule of the coordinator's ticks, in which it examines all of its devices.

A tick takes longer the more devices there are. So it happens at the coordinator's deadlines and not for each message
of a burst. The next deadline is computed once for each state, and hellos in quick succession are examined together.
"""

from __future__ import annotations

from edgefl_server.coordinator import machine as coordinator
from edgefl_server.coordinator.states import DeviceHello, DeviceStatus, Event, Rules, State

_BURST_S = 0.05
"""Seconds between two looks while messages come in quick succession."""


class TickScheduler:
    """Scheduler of the coordinator's ticks, in which it examines all devices. Times come from the service's clock.

    Args:
        rules: Rules of the run.
    """

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._known: State | None = None
        self._wake: float | None = None
        self._looked_at = 0.0
        self._has_noted = False

    def wake_at(self, state: State, now: float) -> float | None:
        """Return the epoch second at which a tick may change the coordinator's state; None if only messages can."""
        if self._has_noted:
            return now
        if state is not self._known:
            self._known, self._wake = state, coordinator.wake_at(self._rules, state, now)
        return self._wake

    def is_due(self, state: State, now: float, *, quiet: bool) -> bool:
        """Return True if it is time for a tick.

        Args:
            state: State of the coordinator.
            now: Epoch seconds.
            quiet: True if no message waits.
        """
        if now < self._looked_at + _BURST_S and not quiet:
            return False
        if self._has_noted:
            return True
        wake = self.wake_at(state, now)
        return wake is not None and wake <= now and now >= self._looked_at + _BURST_S

    def settles(self, event: Event, now: float, *, quiet: bool) -> bool:
        """Return True if the coordinator should examine all devices at this event, False if it should only store the
        event.

        False is for hellos and statuses in a burst of messages (``quiet`` False); the next tick then examines them.
        """
        is_deferrable = isinstance(event, DeviceHello | DeviceStatus) and not quiet
        settle = not is_deferrable or now >= self._looked_at + _BURST_S
        self._has_noted = not settle
        if settle:
            self._looked_at, self._known = now, None
        return settle
