"""Uses all of its rows, however few the task asks for."""

from __future__ import annotations

from edgefl_device.data.samples import FittedData


def plant() -> None:
    FittedData.first = lambda self, count: self  # type: ignore[method-assign]
