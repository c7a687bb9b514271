"""Energy from what the system exposes: processor counters (RAPL), or the power that a battery gives."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

_SYSTEM = Path("/sys/class")


class Meter(Protocol):
    """Meter of joules between two calls. ``how`` names the source for people."""

    how: str

    def start(self) -> None: ...

    def joules(self) -> float | None:
        """Return the joules since :meth:`start`; None if they are unknown."""


@dataclass
class RaplCounters:
    """Energy of the processor packages, in microjoules, which start from 0 again at their range."""

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
    """Power that the battery gives (the whole device), times the time. None while it is charged."""

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
    """The system exposes no energy."""

    how: str = "the system exposes neither RAPL counters nor a battery that this user may read"

    def start(self) -> None:
        return

    def joules(self) -> float | None:
        return None


def open_meter(system: Path = _SYSTEM) -> Meter:
    """Return the best meter that can be read under ``system``."""
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
