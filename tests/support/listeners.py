"""Listeners of events."""

from __future__ import annotations

from collections.abc import Callable

from edgefl_server.events import Event


class CallingListener:
    """Listener that passes each event to a function."""

    def __init__(self, take: Callable[[Event], object]) -> None:
        self._take = take

    def emit(self, event: Event) -> None:
        self._take(event)
