"""Logs of devices that tests read."""

from __future__ import annotations

import queue

from edgefl_device.config import AgentEvent, DeviceLog


class RecordedLog(DeviceLog):
    """Log that keeps its events, in ``events`` for one reader that waits, and their texts in ``texts``."""

    def __init__(self) -> None:
        self.events: queue.SimpleQueue[AgentEvent] = queue.SimpleQueue()
        self.texts: list[str] = []
        super().__init__(self._record)

    def _record(self, event: AgentEvent) -> None:
        self.texts.append(event.text)
        self.events.put(event)
