"""What a round costs on this device: time per graph and resident memory."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from device_runtime.memory import reset_peak, resident_bytes


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
        ordered = sorted(
            self.times_ms.get(name, [0.0])
        )  # NumPy's median imports its masked arrays: over 1 MB
        return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2

    def total_ms(self, name: str) -> float:
        return sum(self.times_ms.get(name, [0.0]))

    def last_ms(self, name: str) -> float:
        return self.times_ms.get(name, [0.0])[-1]
