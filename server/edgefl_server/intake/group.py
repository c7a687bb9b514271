"""Updates that are good and not journaled yet: those that come within a few milliseconds are kept in one step."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from edgefl.wire.mqtt.messages import Update
from edgefl_server.aggregate.aggregator import Checked
from edgefl_server.storage.update_rows import AcceptedUpdate

MOST_UPDATES = 64
MOST_BYTES = 4 << 20
LONGEST_S = 0.05
"""A group is journaled at the latest when it has so many updates, or bytes, or its first one has waited so long."""


@dataclass(frozen=True, slots=True)
class GoodUpdate:
    """``row`` is for the journal, ``added`` for the sums, ``update`` for people."""

    row: AcceptedUpdate
    update: Update
    added: Checked

    @property
    def device(self) -> str:
        return self.row.assignment.device


class Group:
    """In the order in which they came, one of each device."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._updates: dict[str, GoodUpdate] = {}
        self._nbytes = 0
        self._since = 0.0

    def __len__(self) -> int:
        return len(self._updates)

    def __contains__(self, device: str) -> bool:
        return device in self._updates

    def add(self, update: GoodUpdate) -> None:
        if not self._updates:
            self._since = self._clock()
        self._updates[update.device] = update
        self._nbytes += len(update.row.data)

    def wait(self) -> float | None:
        """Seconds until it is to be journaled, whatever comes meanwhile; None if there is nothing to journal."""
        if not self._updates:
            return None
        if len(self._updates) >= MOST_UPDATES or self._nbytes >= MOST_BYTES:
            return 0.0
        return max(0.0, self._since + LONGEST_S - self._clock())

    def take(self) -> list[GoodUpdate]:
        """All of them; the group is empty then."""
        updates = list(self._updates.values())
        self._updates, self._nbytes = {}, 0
        return updates
