"""What a round costs on this device: time per graph, resident memory, bytes."""

from __future__ import annotations

import ctypes
import gc
import resource
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")


def resident_bytes() -> int:
    """Resident set size now; the peak where the system tells nothing better."""
    return _status_bytes("VmRSS") or _peak_of_process()


def peak_bytes() -> int:
    """Highest resident set size since :func:`reset_peak`."""
    return _status_bytes("VmHWM") or _peak_of_process()


def reset_peak() -> None:
    """Start a new peak measurement, where the system can (Linux)."""
    with suppress(OSError):
        _CLEAR_REFS.write_text("5")


def trim_memory() -> None:
    """Give freed memory back to the system, so that what was dropped is really gone."""
    gc.collect()
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)


def _status_bytes(field: str) -> int:
    try:
        for line in _STATUS.read_text().splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    except OSError:
        return 0
    return 0


def _peak_of_process() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class Profiler:
    """Collects the timings of one round, by name."""

    def __init__(self) -> None:
        self.idle_bytes = resident_bytes()
        self.times_ms: dict[str, list[float]] = {}
        reset_peak()

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.times_ms.setdefault(name, []).append(1e3 * (time.perf_counter() - start))

    def median_ms(self, name: str) -> float:
        return statistics.median(self.times_ms.get(name, [0.0]))

    def total_ms(self, name: str) -> float:
        return sum(self.times_ms.get(name, [0.0]))

    def last_ms(self, name: str) -> float:
        return self.times_ms.get(name, [0.0])[-1]
