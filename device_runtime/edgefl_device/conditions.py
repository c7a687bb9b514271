"""In what conditions this device is: asked of the system, of its owner's commands and policy, and told to the server.

The owner's own words come first: the command ``surroundings`` of the policy prints lines such as ::

    power = battery
    thermal = warm
    available = no

Of what it leaves out, the policy's other commands and the system are asked. What nobody knows stays unknown.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from edgefl.wire.mqtt.messages import LINK, POWER, THERMAL, UNKNOWN_CONDITIONS, Conditions
from edgefl_device.policy import Ask, Condition, Rules, output_of

_ZONES = Path("/sys/class/thermal")
_NEAR_C = 10.0
"""So much below the temperature from which the system slows down it is warm."""
_BELOW_CRITICAL_C = 20.0
"""Where a system only says when it switches itself off, it is taken to slow down so much below."""
_MOST_TOLD = 4096
_FIRST_LOOK_S = 2.0
_WORDS: Mapping[str, tuple[str, ...]] = {
    "power": POWER,
    "link": LINK,
    "thermal": THERMAL,
    "available": ("yes", "no"),
}


@dataclass(frozen=True)
class Look:
    """One look at all there is. ``rules`` are the owner's; ``zones`` is where Linux tells temperatures."""

    rules: Rules
    zones: Path = _ZONES

    def __call__(self) -> Conditions:
        told = words(output_of(command)) if (command := self.rules.policy.surroundings) else {}
        ask = _with(told, self.rules.ask)
        available = told.get("available") != "no" and not replace(self.rules, ask=ask).why_not("train")
        return Conditions(
            power=_word(ask("charging"), "charging", "battery"),
            link=_word(ask("unmetered"), "unmetered", "metered"),
            thermal=told.get("thermal") or heat(self.zones),
            available=available,
        )


def words(text: str) -> dict[str, str]:
    """What lines of ``name = word`` say, of the names and words that there are; all else is passed over."""
    told = {}
    for line in text[:_MOST_TOLD].splitlines():
        name, _, word = (part.strip().strip('"') for part in line.partition("="))
        if word in _WORDS.get(name, ()):
            told[name] = word
    return told


def heat(zones: Path = _ZONES) -> str:
    """How hot the hottest part is, beside the temperature from which the system slows it down; "" where it does not say."""
    found = [zone for each in sorted(zones.glob("thermal_zone*")) if (zone := _heat_of(each))]
    return max(found, key=THERMAL.index, default="")


def _heat_of(zone: Path) -> str:
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


def _with(told: Mapping[str, str], ask: Ask) -> Ask:
    """Asks what was told, and else ``ask``, once for each condition."""

    @cache
    def asked(condition: Condition) -> bool | None:
        word = told.get("power" if condition == "charging" else "link")
        return word == condition if word else ask(condition)

    return asked


def _word(holds: bool | None, yes: str, no: str) -> str:
    return "" if holds is None else yes if holds else no


class Watch:
    """Looks now and then, on a thread of its own for as long as a look takes: an owner's command may hang.

    ``wake`` is called when the conditions are others than before; everything else is for one thread.
    """

    def __init__(
        self,
        look: Callable[[], Conditions],
        every_s: float,
        wake: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._look = look
        self._every_s = every_s
        self._wake = wake
        self._clock = clock
        self._thread: threading.Thread | None = None
        self._next = 0.0
        self._known = UNKNOWN_CONDITIONS
        self._told: Conditions | None = None

    def begin(self) -> None:
        """The first look, of which is not waited for long."""
        self._start()
        if self._thread is not None:
            self._thread.join(_FIRST_LOOK_S)

    def step(self) -> bool:
        """To be called now and then: whether the conditions are others than those that were last told."""
        if self._clock() >= self._next and (self._thread is None or not self._thread.is_alive()):
            self._start()
        return self._told is not None and self._known != self._told

    def tell(self) -> Conditions:
        """The conditions as they are known, which are told from now on."""
        known = self._told = self._known
        return known

    def _start(self) -> None:
        self._next = self._clock() + self._every_s
        self._thread = threading.Thread(target=self._once, name="conditions", daemon=True)
        self._thread.start()

    def _once(self) -> None:
        with suppress(Exception):  # of the store, for example, when the agent ends: there is a next time
            known = self._look()
            if known != self._known:
                self._known = known
                self._wake()
