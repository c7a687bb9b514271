"""Says that it used all of its rows."""

from __future__ import annotations

from tests.conformance.wrong.update import changed


def plant() -> None:
    changed(lambda executor, update: {"samples": len(executor._data)})
