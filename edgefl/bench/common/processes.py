"""Processor time and memory of a process and its descendants."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

import psutil


def family(pid: int) -> list[psutil.Process]:
    """Return the process and all its descendants; nothing if it has ended."""
    try:
        first = psutil.Process(pid)
        return [first, *first.children(recursive=True)]
    except psutil.Error:
        return []


def cpu_seconds(processes: Iterable[psutil.Process]) -> float:
    """Return the processor seconds of those that still run, together."""
    total = 0.0
    for process in processes:
        with suppress(psutil.Error):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def resident_bytes(processes: Iterable[psutil.Process]) -> int:
    """Return the resident set sizes of those that still run, together."""
    total = 0
    for process in processes:
        with suppress(psutil.Error):
            total += process.memory_info().rss
    return total
