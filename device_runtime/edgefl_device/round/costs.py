"""Costs of a round on this device: time per graph, and anonymous memory."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from edgefl_device.engine.base import Engine
from edgefl_device.memory import anonymous_bytes
from edgefl_device.sandbox.engine import used_bytes


class Profiler:
    """Collects the timings of one round, by name, and its highest memory behind a timed part.

    An engine keeps the memory of a step until its graph is dropped: the memory behind a step is its peak.

    Args:
        engine: if it runs in a process of its own, the memory of that counts, above its idle self.
    """

    def __init__(self, engine: Engine | None = None) -> None:
        self._engine = engine
        self.idle_bytes = self.most_bytes = anonymous_bytes()
        self.times_ms: dict[str, list[float]] = {}

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.times_ms.setdefault(name, []).append(1e3 * (time.perf_counter() - start))
            self.most_bytes = max(self.most_bytes, anonymous_bytes() + used_bytes(self._engine))

    def median_ms(self, name: str) -> float:
        ordered = sorted(
            self.times_ms.get(name, [0.0])
        )  # NumPy's median imports its masked arrays: over 1 MB
        return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2

    def total_ms(self, name: str) -> float:
        return sum(self.times_ms.get(name, [0.0]))

    def last_ms(self, name: str) -> float:
        return self.times_ms.get(name, [0.0])[-1]
