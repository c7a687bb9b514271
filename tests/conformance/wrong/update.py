"""For faults that are in an update: fields that take the place of the right ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from edgefl.wire.mqtt.messages import Update
from edgefl_device.round import work

Change = Callable[[work.Work, dict[str, Any]], dict[str, Any]]


def changed(change: Change) -> None:
    """Have `edgefl device` send updates with the fields that ``change`` gives."""
    hand_over = work.Work._hand_over

    def with_change(self: work.Work, *arguments: Any) -> None:
        def made(**fields: Any) -> Update:
            return Update(**{**fields, **change(self, fields)})

        work.Update = made  # type: ignore[misc, assignment]
        hand_over(self, *arguments)

    work.Work._hand_over = with_change  # type: ignore[method-assign]
