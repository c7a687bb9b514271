"""Loads whatever bundle it is offered."""

from __future__ import annotations

from edgefl_device.link.identity import ServerTrust


def plant() -> None:
    ServerTrust.check_bundle = lambda *_: None  # type: ignore[method-assign, assignment]
