"""Has no last will."""

from __future__ import annotations

from typing import Any

from edgefl.wire.mqtt.session import Session
from edgefl_device import agent


def plant() -> None:
    def without(*arguments: Any, **options: Any) -> Session:
        return Session(*arguments, **{**options, "will": None})

    agent.Session = without  # type: ignore[misc, assignment]
