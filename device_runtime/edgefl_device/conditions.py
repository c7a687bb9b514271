"""Conditions of this device (power, link, heat, availability) from the system and the owner's commands, for the server.

The owner's command ``surroundings`` in the policy takes precedence. It prints lines such as ::

    power = battery
    thermal = warm
    available = no

For lines that it leaves out, the policy's other commands and the system are used. The rest stays unknown.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from edgefl.wire.mqtt.messages import LINK, POWER, THERMAL, UNKNOWN_CONDITIONS, Conditions
from edgefl.wire.mqtt.session import Session
from edgefl_device.policy import Condition, OwnerRules, SystemQueries, command_output

_ZONES = Path("/sys/class/thermal")
_NEAR_C = 10.0
"""Degrees below the temperature of throttling from which the device counts as warm."""
_BELOW_CRITICAL_C = 20.0
"""Degrees below the temperature of switching off at which a system without a throttling point is taken to throttle."""
_MOST_OUTPUT = 4096
_FIRST_READING_S = 2.0
_VALUES: Mapping[str, tuple[str, ...]] = {
    "power": POWER,
    "link": LINK,
    "thermal": THERMAL,
    "available": ("yes", "no"),
}


class ConditionsSensor:
    """Reads the conditions of this device.

    Args:
        rules: The owner's rules.
        zones: Folder in which Linux lists temperatures.
    """

    def __init__(self, rules: OwnerRules, zones: Path = _ZONES) -> None:
        self._rules = rules
        self._zones = zones

    def read(self) -> Conditions:
        """Return the conditions now; may run the owner's commands."""
        command = self._rules.policy.surroundings
        reported = parse_conditions(command_output(command)) if command else {}
        queries = _CachedQueries(reported, self._rules.queries)
        rules = replace(self._rules, queries=queries)
        charging, unmetered = queries.holds("charging"), queries.holds("unmetered")
        return Conditions(
            power="" if charging is None else "charging" if charging else "battery",
            link="" if unmetered is None else "unmetered" if unmetered else "metered",
            thermal=reported.get("thermal") or heat(self._zones),
            available=reported.get("available") != "no" and not rules.objection("train"),
        )


class _CachedQueries(SystemQueries):
    """Conditions as the owner's command reported them, and else as the system reports them, each queried once."""

    def __init__(self, reported: Mapping[str, str], queries: SystemQueries) -> None:
        super().__init__()
        self._reported = reported
        self._queries = queries
        self._results: dict[Condition, bool | None] = {}

    def holds(self, condition: Condition) -> bool | None:
        if condition not in self._results:
            word = self._reported.get("power" if condition == "charging" else "link")
            self._results[condition] = word == condition if word else self._queries.holds(condition)
        return self._results[condition]


def parse_conditions(text: str) -> dict[str, str]:
    """Return the known names and values of lines such as ``power = battery``; ignore everything else."""
    values = {}
    for line in text[:_MOST_OUTPUT].splitlines():
        name, _, value = (part.strip().strip('"') for part in line.partition("="))
        if value in _VALUES.get(name, ()):
            values[name] = value
    return values


def heat(zones: Path = _ZONES) -> str:
    """Return the heat of the hottest zone compared with its throttling point; "" if the system does not report it."""
    values = [value for zone in sorted(zones.glob("thermal_zone*")) if (value := _zone_heat(zone))]
    return max(values, key=THERMAL.index, default="")


def _zone_heat(zone: Path) -> str:
    limits: list[float] = []
    with suppress(OSError, ValueError):
        now = _degrees(zone / "temp")
        for trip in sorted(zone.glob("trip_point_*_type")):
            kind, limit = trip.read_text().strip(), _degrees(trip.with_name(trip.name[:-4] + "temp"))
            if limit > 0 and kind in ("passive", "hot", "critical"):
                limits.append(limit - (_BELOW_CRITICAL_C if kind == "critical" else 0.0))
        if limits:
            return "hot" if now >= min(limits) else "warm" if now >= min(limits) - _NEAR_C else "cool"
    return ""


def _degrees(path: Path) -> float:
    return int(path.read_text()) / 1000


class ConditionsMonitor:
    """Reads the conditions now and then, on a thread of its own: an owner's command may hang.

    Args:
        sensor: Reads the conditions.
        period_s: Time between two readings.
        session: Session whose reader is woken when the conditions have changed.
    """

    def __init__(self, sensor: ConditionsSensor, period_s: float, session: Session) -> None:
        self._sensor = sensor
        self._period_s = period_s
        self._session = session
        self._thread: threading.Thread | None = None
        self._next = 0.0
        self._known = UNKNOWN_CONDITIONS
        self._taken: Conditions | None = None

    def begin(self) -> None:
        """Read for the first time, and wait a moment for the result."""
        self._start()
        if self._thread is not None:
            self._thread.join(_FIRST_READING_S)

    def step(self) -> bool:
        """Read if it is time; return True if the conditions differ from those last taken. Call it now and then."""
        if time.monotonic() >= self._next and (self._thread is None or not self._thread.is_alive()):
            self._start()
        return self._taken is not None and self._known != self._taken

    def take(self) -> Conditions:
        """Return the last known conditions."""
        known = self._taken = self._known
        return known

    def _start(self) -> None:
        self._next = time.monotonic() + self._period_s
        self._thread = threading.Thread(target=self._read, name="conditions", daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with suppress(Exception):  # of the store, for example, when the agent ends: there is a next time
            known = self._sensor.read()
            if known != self._known:
                self._known = known
                self._session.wake()
