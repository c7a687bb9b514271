"""Keeps its update after the server's last word on it, and sends it on and on."""

from __future__ import annotations

from edgefl_device.store.database import Store


def plant() -> None:
    Store.settle = lambda self, past: None  # type: ignore[method-assign]
