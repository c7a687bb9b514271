"""Orders and vitals as the service has them: one thing to start, to ask and to stop."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from edgefl.wire.mqtt.inbox import Inbox
from server import events
from server.operations.mailbox import Mailbox
from server.operations.operator import Course, Given, Models, Operator
from server.operations.watcher import Probe, Sent, Watcher

__all__ = ["Given", "Operations", "Probe"]


class Operations:
    """Of the server in ``folder``, whose rounds are ``course`` and whose models are ``models``."""

    def __init__(
        self,
        folder: Path,
        course: Course,
        models: Models,
        inbox: Inbox[Any],
        emit: Callable[[events.Event], None],
    ) -> None:
        mailbox = Mailbox(folder)
        self._inbox = inbox
        self._emit = emit
        self._operator = Operator(mailbox, course, models, emit)
        self._watcher = Watcher(mailbox, inbox.put)

    @property
    def holds(self) -> bool:
        """Whether no round may open yet."""
        return self._operator.holds

    def start(self) -> None:
        self._watcher.start()

    def stop(self) -> None:
        self._watcher.stop()

    def sent(self, delivery: Sent) -> None:
        """A message went to the broker."""
        self._watcher.sent(delivery)

    def take(self, event: Given | Probe) -> None:
        """What came out of the inbox."""
        if isinstance(event, Given):
            self._operator.take(event)
        else:
            self._emit(self._watcher.vitals(event, self._inbox.qsize()))

    def step(self, *, judged: bool) -> None:
        """Do what waited for the end of a round. ``judged``: the models of all rounds have been evaluated."""
        self._operator.step(judged=judged)
