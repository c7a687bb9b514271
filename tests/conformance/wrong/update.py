"""For faults that are in an update: fields that take the place of the right ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from edgefl.wire.mqtt.messages import Update
from edgefl_device.round import executor
from edgefl_device.round.executor import RoundExecutor

Change = Callable[[RoundExecutor, dict[str, Any]], dict[str, Any]]


def changed(change: Change) -> None:
    """Have `edgefl device` send updates with the fields that ``change`` gives."""
    store_update = RoundExecutor._store_update

    def with_change(self: RoundExecutor, *arguments: Any) -> None:
        def made(**fields: Any) -> Update:
            return Update(**{**fields, **change(self, fields)})

        executor.Update = made  # type: ignore[misc, assignment]
        store_update(self, *arguments)

    RoundExecutor._store_update = with_change  # type: ignore[method-assign]
