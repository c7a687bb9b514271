"""Hears a key for ever, though its time is over."""

from __future__ import annotations

from device_runtime.link import identity


def plant() -> None:
    known_after = identity.known_after
    identity.known_after = lambda known, said: dict.fromkeys(known_after(known, said), identity.FOREVER)
