"""Policy of a device's owner, a TOML file: which work is allowed, and when.

::

    train = true                    # take tasks at all
    evaluate = true                 # measure the model on the held-out rows
    statistics = true               # sum up the data without training
    profile = false                 # measure bundles on request
    mirrors = false                 # fetch weights from mirrors that the server names (its own ones always)
    charging = true                 # only on mains power
    unmetered = true                # only on a link that costs nothing
    quiet = ["22:00-07:00"]         # no work in these hours of the day
    bytes_a_day = "200MiB"          # over the link, both ways
    duty = 0.5                      # share of the time in which steps are made
    tell = true                     # report power, link, heat and availability to the server
    surroundings = ["board-state"]  # a command that prints conditions (:class:`SystemQueries`)

    [commands]                      # replace the query of the system; exit code 0 is yes
    unmetered = ["/usr/local/bin/is-unmetered"]

A device that declines for its policy sends this reason, and the round continues.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal, Protocol

import msgspec

from edgefl.errors import ConfigError, RoundDeclined
from edgefl.system.sizes import parse_size, size
from edgefl.wire.mqtt.messages import LINK, POLICY, POWER, THERMAL, UNKNOWN_CONDITIONS, Conditions
from edgefl.wire.mqtt.session import Session
from edgefl.wire.text import describe_unknown

Condition = Literal["charging", "unmetered"]
WorkKind = Literal["train", "evaluate", "statistics", "profile"]
ROUND_WORK: tuple[WorkKind, ...] = ("train", "evaluate", "statistics")
"""Kinds of work that a round may ask for. The last two are also the names of their exchanges in manifests."""


def work_of(exchange: str) -> WorkKind:
    """Return the kind of work of a manifest's ``exchange``: ``train`` for all but those that only measure."""
    return next((work for work in ROUND_WORK if work == exchange), "train")


_HOURS = re.compile(r"([01]\d|2[0-3]):([0-5]\d)-([01]\d|2[0-3]):([0-5]\d)")
_COMMAND_S = 10.0
_SUPPLIES = Path("/sys/class/power_supply")
_NETWORK_MANAGER = "org.freedesktop.NetworkManager"
_METERED = (
    *("busctl", "--system", "--auto-start=no", "get-property"),
    *(_NETWORK_MANAGER, "/org/freedesktop/NetworkManager", _NETWORK_MANAGER, "Metered"),
)


class OwnerPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Keys of the owner's policy file, a TOML file; each has a default.

    Attributes:
        train: Take tasks at all.
        evaluate: Take tasks that measure the model on the held-out rows. None: as ``train``.
        statistics: Take tasks that sum up the data without training. None: as ``train``.
        profile: Measure bundles on request.
        mirrors: Download blobs from mirrors that the server names.
        charging: Work only on mains power.
        unmetered: Work only on a link that costs nothing.
        quiet: Hours without work, such as ``22:00-07:00``.
        bytes_a_day: Most bytes a day over the link, as a number or a text such as ``200MiB``; 0 is no limit.
        duty: Share of the time in which steps are made.
        tell: Report power, link, heat and availability to the server.
        surroundings: Command that prints conditions.
        commands: Command that replaces the system's query, by condition.
    """

    train: bool = True
    evaluate: bool | None = None
    statistics: bool | None = None
    profile: bool = True
    mirrors: bool = True
    charging: bool = False
    unmetered: bool = False
    quiet: tuple[str, ...] = ()
    bytes_a_day: str | int = 0
    duty: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    tell: bool = True
    surroundings: tuple[str, ...] = ()
    commands: dict[Condition, tuple[str, ...]] = {}

    def allows(self, work: WorkKind) -> bool:
        """Return True if the owner permits this kind of work at all."""
        asked: bool | None = getattr(self, work)
        return self.train if asked is None else asked

    @property
    def most_bytes(self) -> int:
        """Most bytes of a day over the link, sent and received; 0 is no limit."""
        return parse_size(self.bytes_a_day) if isinstance(self.bytes_a_day, str) else self.bytes_a_day

    @property
    def hours(self) -> tuple[tuple[int, int], ...]:
        """Quiet hours as (start, end) in minutes of the day; an interval may span midnight."""
        found = [_HOURS.fullmatch(text) for text in self.quiet]
        return tuple(
            (60 * int(each[1]) + int(each[2]), 60 * int(each[3]) + int(each[4])) for each in found if each
        )


def read_policy(path: Path) -> OwnerPolicy:
    """Return the policy in the TOML file ``path``.

    Raises:
        ConfigError: The file is missing, malformed, or has an unknown key or bad value; the text names file and
            mistake.
    """
    import tomllib  # most devices have no such file, and an idle one has to be small

    try:
        table = tomllib.loads(path.read_text(encoding="utf-8-sig"))
        if wrong := describe_unknown(table, OwnerPolicy.__struct_fields__):
            raise ValueError(f"{wrong[0]}; the keys are {', '.join(OwnerPolicy.__struct_fields__)}")
        policy = msgspec.convert(table, OwnerPolicy)
        wrong = [text for text in policy.quiet if not _HOURS.fullmatch(text)]
        if wrong:
            raise ValueError(f"quiet hours are like 22:00-07:00, found {wrong[0]!r}")
        if policy.most_bytes < 0:
            raise ValueError(f"bytes_a_day is at least 0, found {policy.most_bytes}")
    except (OSError, ValueError, RecursionError) as error:  # msgspec's and tomllib's are ValueErrors
        raise ConfigError(f"the policy {path} cannot be used: {error}", path=str(path)) from error
    return policy


class SystemQueries:
    """Queries of the conditions ``charging`` and ``unmetered``: by the owner's command if there is one, else from the
    system.

    The system is Linux with NetworkManager; elsewhere conditions are unknown.

    Args:
        commands: Commands by condition; exit code 0 means yes.
    """

    def __init__(self, commands: Mapping[Condition, tuple[str, ...]] | None = None) -> None:
        self._commands = commands or {}

    def holds(self, condition: Condition) -> bool | None:
        """Return True if the condition holds, False if it does not, None if it is unknown. May run the owner's command."""
        if command := self._commands.get(condition):
            done = _run(command)
            return done[0] == 0 if done is not None else None
        return on_mains() if condition == "charging" else not_metered(command_output(_METERED))


class TrafficLog(Protocol):
    """Interface of a counter of the bytes that went over the link, by day."""

    def traffic(self, day: str) -> int: ...


def on_mains(supplies: Path = _SUPPLIES) -> bool | None:
    """Return True if the machine runs on mains power, False on battery, None if the system does not report it."""
    kinds: dict[str, list[str]] = {}
    if not supplies.is_dir():
        return None
    for supply in sorted(supplies.iterdir()):
        with suppress(OSError):
            kind = (supply / "type").read_text().strip()
            state = supply / ("status" if kind == "Battery" else "online")
            kinds.setdefault("battery" if kind == "Battery" else "mains", []).append(
                state.read_text().strip()
            )
    batteries = kinds.get("battery", [])
    if "1" in kinds.get("mains", []) or any(status in ("Charging", "Full") for status in batteries):
        return True
    return not batteries  # without one it runs on mains, or does not run


def not_metered(output: str) -> bool | None:
    """Return True if a link is unmetered: NetworkManager's property Metered is no (2) or guessed no (4).

    Return False for yes (1) and guessed yes (3), None if it is unknown.

    Args:
        output: The property as ``busctl`` prints it, such as ``u 2``.
    """
    return {"u 1": False, "u 2": True, "u 3": False, "u 4": True}.get(output.strip())


def command_output(command: tuple[str, ...]) -> str:
    """Run a command and return its standard output; "" if it cannot be run, fails, or takes too long."""
    done = _run(command)
    return done[1].decode(errors="replace") if done is not None and done[0] == 0 else ""


def _run(command: tuple[str, ...]) -> tuple[int, bytes] | None:
    """Run a command; return (exit code, standard output), or None if it cannot be run or takes too long."""
    import subprocess

    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_COMMAND_S,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.returncode, done.stdout


@dataclass(frozen=True)
class OwnerRules:
    """Rules that decide if work is allowed now: the owner's policy, the conditions and today's traffic."""

    policy: OwnerPolicy
    queries: SystemQueries
    traffic: TrafficLog

    def check(self, *works: WorkKind) -> None:
        """Raise RoundDeclined, with the reason, if none of ``works`` is allowed now. May run the owner's commands."""
        if objection := self.objection(*works):
            raise RoundDeclined(POLICY, f"the policy of this device does not allow it: {objection}")

    def objection(self, *works: WorkKind) -> str:
        """Return the reason why none of ``works`` is allowed now, or "" if one is. May run the owner's commands."""
        policy, now = self.policy, time.localtime()
        if not any(map(policy.allows, works)):
            return f"{'train' if getattr(policy, works[0]) is None else works[0]} is false"
        minute = 60 * now.tm_hour + now.tm_min
        for text, (start, stop) in zip(policy.quiet, policy.hours, strict=True):
            within = start <= minute < stop if start <= stop else minute >= start or minute < stop
            if within:
                return f"these are quiet hours ({text})"
        if policy.most_bytes and (used := self.traffic.traffic(day_of(now))) >= policy.most_bytes:
            return f"{size(used)} went over the link today, of {size(policy.most_bytes)}"
        required: tuple[tuple[bool, Condition], ...] = (
            (policy.charging, "charging"),
            (policy.unmetered, "unmetered"),
        )
        for is_required, condition in required:
            holds = self.queries.holds(condition) if is_required else True
            if holds is None:
                return f"it is unknown whether it is {condition}: name a command in [commands]"
            if not holds:
                return f"it is not {condition}"
        return ""


def day_of(now: time.struct_time) -> str:
    """Return the date of ``now`` as text, the key of the store's traffic counts."""
    return time.strftime("%Y-%m-%d", now)


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
    """Reader of the device's conditions: power, link, heat, and whether its owner's rules allow training.

    Args:
        rules: The owner's rules.
        zones: Folder in which Linux lists temperatures.
    """

    def __init__(self, rules: OwnerRules, zones: Path = _ZONES) -> None:
        self._rules = rules
        self._zones = zones

    def read(self) -> Conditions:
        """Return the current conditions; may run the owner's commands. Unknown ones are ""."""
        command = self._rules.policy.surroundings
        reported = parse_conditions(command_output(command)) if command else {}
        queries = _CachedQueries(reported, self._rules.queries)
        rules = replace(self._rules, queries=queries)
        charging, unmetered = queries.holds("charging"), queries.holds("unmetered")
        return Conditions(
            power="" if charging is None else "charging" if charging else "battery",
            link="" if unmetered is None else "unmetered" if unmetered else "metered",
            thermal=reported.get("thermal") or heat(self._zones),
            available=reported.get("available") != "no" and not rules.objection(*ROUND_WORK),
        )


class _CachedQueries(SystemQueries):
    """Queries answered from the output of the owner's command, else from the system, each at most once."""

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
    """Return the conditions in lines such as ``power = battery``. Unknown names and values are ignored."""
    values = {}
    for line in text[:_MOST_OUTPUT].splitlines():
        name, _, value = (part.strip().strip('"') for part in line.partition("="))
        if value in _VALUES.get(name, ()):
            values[name] = value
    return values


def heat(zones: Path = _ZONES) -> str:
    """Return the level (``cool``, ``warm`` or ``hot``) of the hottest zone compared with its throttling temperature.

    Return "" if the system does not report it. ``zones`` is the folder in which Linux lists temperatures.
    """
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
    """Periodic reader of the conditions on a thread of its own, because an owner's command may hang.

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
        """Start the first reading, and wait a short time for its result."""
        self._start()
        if self._thread is not None:
            self._thread.join(_FIRST_READING_S)

    def step(self) -> bool:
        """Start a reading if it is due. Return True if the conditions changed since :meth:`take`. Call it periodically."""
        if time.monotonic() >= self._next and (self._thread is None or not self._thread.is_alive()):
            self._start()
        return self._taken is not None and self._known != self._taken

    def take(self) -> Conditions:
        """Return the latest conditions, and remember them as reported."""
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
