"""Whether a device hears where the run is. One that gets no task for a while stops listening until it is called.

Each round is announced to all who listen. Where a server selects a hundred of ten thousand devices, the others would cost
the broker more than the round does.
"""

from __future__ import annotations

from collections.abc import Callable

from edgefl.wire.mqtt.messages import Round
from edgefl.wire.mqtt.session import Session

_ROUNDS = 2
"""Rounds without a task that a device listens to: by then it knows what became of its last one."""


class Listening:
    """``topic`` is that of the announcement; ``idle`` says whether the device has nothing to do and nothing to send."""

    def __init__(self, session: Session, topic: str, idle: Callable[[], bool]) -> None:
        self._session = session
        self._topic = topic
        self._idle = idle
        self._rounds: set[tuple[str, int]] = set()
        self._resting = False

    def begin(self) -> None:
        """Listen: the process starts, the connection is new, or there is a task. The broker says what it retains."""
        self._rounds.clear()
        if self._resting:
            self._resting = False
            self._session.subscribe([self._topic])

    def heard(self, announced: Round) -> None:
        """An announcement came; one of many rounds without a task is the last one for a while."""
        if announced.state == "done":
            return
        if announced.state == "open":
            self._rounds.add((announced.run, announced.round))
        if len(self._rounds) > _ROUNDS and self._idle():
            self._resting = True
            self._session.unsubscribe([self._topic])
