"""Meters of the measuring process: energy, if the system exposes it, and anonymous memory over time."""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol

from edgefl.wire.bundle.profiles import MOMENTS, MemorySample
from edgefl_device.host import anonymous_bytes

_SYSTEM = Path("/sys/class")


class Meter(Protocol):
    """Interface of an energy meter. ``how`` describes the source for people."""

    how: str

    def start(self) -> None: ...

    def joules(self) -> float | None:
        """Return the joules since :meth:`start`, or None if they are unknown."""


@dataclass
class RaplCounters:
    """Energy of the processor packages from RAPL counters in microjoules, which wrap around at their range."""

    packages: tuple[Path, ...]
    how: str = "RAPL counters of the processor packages, everything else that ran included"

    def start(self) -> None:
        self._before = [_number(package / "energy_uj") for package in self.packages]

    def joules(self) -> float | None:
        spent = 0
        for package, before in zip(self.packages, self._before, strict=True):
            after = _number(package / "energy_uj")
            if before is None or after is None:
                return None
            spent += (
                after - before
                if after >= before
                else after - before + (_number(package / "max_energy_range_uj") or 0)
            )
        return spent / 1e6


@dataclass
class Battery:
    """Energy from the battery's power (of the whole device) times the elapsed time; None while it is charged."""

    folder: Path
    how: str = "power of the battery, the whole device included"

    def start(self) -> None:
        self._start = time.perf_counter()

    def joules(self) -> float | None:
        watts = self._watts()
        return None if watts is None else watts * (time.perf_counter() - self._start)

    def _watts(self) -> float | None:
        if _text(self.folder / "status") not in ("", "Discharging"):
            return None
        power = _number(self.folder / "power_now")
        if power is not None:
            return abs(power) / 1e6
        current, voltage = _number(self.folder / "current_now"), _number(self.folder / "voltage_now")
        return None if current is None or voltage is None else abs(current * voltage) / 1e12


@dataclass
class NoMeter:
    """Meter for systems that expose no energy; ``joules`` is always None."""

    how: str = "the system exposes neither RAPL counters nor a battery that this user may read"

    def start(self) -> None:
        return

    def joules(self) -> float | None:
        return None


def open_meter(system: Path = _SYSTEM) -> Meter:
    """Return a meter for the energy of this machine: its RAPL counters if readable, else its battery, else NoMeter.

    ``system`` is the folder of the kernel's device classes.
    """
    packages = sorted(
        folder for folder in system.glob("powercap/intel-rapl:*") if folder.name.count(":") == 1
    )
    if packages and all(_number(folder / "energy_uj") is not None for folder in packages):
        return RaplCounters(tuple(packages))
    for folder in sorted(system.glob("power_supply/*")):
        battery = Battery(folder)
        battery.start()
        if _text(folder / "type") == "Battery" and battery.joules() is not None:
            return battery
    return NoMeter()


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    try:
        return int(_text(path))
    except ValueError:
        return None


_STATM = Path("/proc/self/statm")
_PERIOD_S = 0.001
_MOST_KEPT = 8 * MOMENTS


class MemorySampler:
    """Context manager that samples anonymous memory on a thread. ``moments`` holds the samples afterwards.

    ``now_ms`` is the time on the same clock.
    """

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._seen: list[MemorySample] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory", daemon=True)
        self._page = mmap.PAGESIZE if _STATM.exists() else 0

    def __enter__(self) -> MemorySampler:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    @property
    def moments(self) -> tuple[MemorySample, ...]:
        return thinned(self._seen)

    def ms_of(self, moment: float) -> float:
        """Convert a value of ``time.perf_counter()`` to milliseconds since sampling began; 0 for earlier ones."""
        return round(max(0.0, 1e3 * (moment - self._start)), 2)

    @property
    def now_ms(self) -> float:
        return self.ms_of(time.perf_counter())

    def _watch(self) -> None:
        while not self._ended.wait(_PERIOD_S):
            self._seen.append(MemorySample(self.now_ms, self._anonymous()))
            if len(self._seen) > _MOST_KEPT:  # what is kept is memory of the process that is watched
                self._seen[:] = thinned(self._seen, _MOST_KEPT // 2)
        self._seen.append(MemorySample(self.now_ms, self._anonymous()))

    def _anonymous(self) -> int:
        if not self._page:
            return anonymous_bytes()
        _, resident, of_files, *_ = map(int, _STATM.read_bytes().split())
        return (resident - of_files) * self._page


def thinned(seen: Sequence[MemorySample], most: int = MOMENTS) -> tuple[MemorySample, ...]:
    """Return at most ``most`` of the samples: the highest of each equal part of the time, so that peaks stay."""
    if len(seen) <= most:
        return tuple(seen)
    first, last = seen[0].t_ms, seen[-1].t_ms
    width = (last - first) / most or 1.0
    highest: dict[int, MemorySample] = {}
    for moment in seen:
        part = min(most - 1, int((moment.t_ms - first) / width))
        if part not in highest or moment.rss_bytes > highest[part].rss_bytes:
            highest[part] = moment
    return tuple(highest.values())
