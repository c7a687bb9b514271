"""Anonymous memory over time, sampled by a thread about every millisecond."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from edgefl.wire.bundle.profiles import MOMENTS, Moment
from edgefl_device.memory import anonymous_bytes

_STATM = Path("/proc/self/statm")
_PERIOD_S = 0.001
_MOST_KEPT = 8 * MOMENTS


class MemorySampler:
    """Context that samples memory; ``moments`` holds the samples afterwards, ``now_ms`` is on the same clock."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._seen: list[Moment] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory", daemon=True)
        self._page = os.sysconf("SC_PAGE_SIZE") if _STATM.exists() else 0

    def __enter__(self) -> MemorySampler:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    @property
    def moments(self) -> tuple[Moment, ...]:
        return thinned(self._seen)

    def ms_of(self, moment: float) -> float:
        """Return ``time.perf_counter()`` of a moment as milliseconds since the watch began."""
        return round(max(0.0, 1e3 * (moment - self._start)), 2)

    @property
    def now_ms(self) -> float:
        return self.ms_of(time.perf_counter())

    def _watch(self) -> None:
        while not self._ended.wait(_PERIOD_S):
            self._seen.append(Moment(self.now_ms, self._anonymous()))
            if len(self._seen) > _MOST_KEPT:  # what is kept is memory of the process that is watched
                self._seen[:] = thinned(self._seen, _MOST_KEPT // 2)
        self._seen.append(Moment(self.now_ms, self._anonymous()))

    def _anonymous(self) -> int:
        if not self._page:
            return anonymous_bytes()
        _, resident, of_files, *_ = map(int, _STATM.read_bytes().split())
        return (resident - of_files) * self._page


def thinned(seen: Sequence[Moment], most: int = MOMENTS) -> tuple[Moment, ...]:
    """Return at most ``most`` of the moments: the highest of each equal part of the time, so that no peak is lost."""
    if len(seen) <= most:
        return tuple(seen)
    first, last = seen[0].t_ms, seen[-1].t_ms
    width = (last - first) / most or 1.0
    highest: dict[int, Moment] = {}
    for moment in seen:
        part = min(most - 1, int((moment.t_ms - first) / width))
        if part not in highest or moment.rss_bytes > highest[part].rss_bytes:
            highest[part] = moment
    return tuple(highest.values())
