"""Says that it used all of its rows."""

from __future__ import annotations

from device_runtime.round.work import Work
from tests.conformance.wrong.update import changed


def plant() -> None:
    changed(lambda work, update: {"samples": len(_of(work))})


def _of(work: Work) -> object:
    return work.data
