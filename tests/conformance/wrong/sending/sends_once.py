"""Sends its update once, and waits for an answer that may be lost."""

from __future__ import annotations

from edgefl_device.link.outbox import Outbox


def plant() -> None:
    Outbox.send_again = lambda self: self.wake()  # type: ignore[method-assign]
