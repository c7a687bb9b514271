"""Announcements that name nothing to fetch."""

from __future__ import annotations

from typing import Literal

from edgefl.wire.mqtt.messages import Round


def announcement(
    number: int = 1, *, run: str = "r", state: Literal["open", "closed", "done"] = "open"
) -> Round:
    return Round(
        run=run,
        round=number,
        state=state,
        model_version="v",
        offers={},
        units={},
        hyper={},
        base=0,
        deadline=0.0,
    )
