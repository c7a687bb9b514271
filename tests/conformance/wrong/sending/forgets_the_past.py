"""Forgets which tasks it has done."""

from __future__ import annotations

from edgefl_device.store.database import Store


def plant() -> None:
    Store.past = lambda self, nonce: None  # type: ignore[method-assign]
