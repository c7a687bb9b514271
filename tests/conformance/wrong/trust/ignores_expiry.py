"""Hears a key for ever, though its time is over."""

from __future__ import annotations

from edgefl.wire import keys


def plant() -> None:
    known_after = keys.known_after
    keys.known_after = lambda known, said: dict.fromkeys(known_after(known, said), keys.FOREVER)
