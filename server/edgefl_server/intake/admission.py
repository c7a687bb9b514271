"""Who is let in where more devices of the list say hello than the server takes: a lot decides, and not who comes first.

A device keeps its place once it had a task. The places of the others go to the lowest lots, in whatever order they come; who
finds none is told when to come again, the later the more there are, and not all at once. Where names are not of a list a lot
would only help whoever makes more of them up: there, who comes first keeps the place (:mod:`edgefl_server.intake.gate`).
"""

from __future__ import annotations

import hashlib
import heapq
import re
from collections import OrderedDict
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from edgefl.wire.limits import Limits
from edgefl.wire.mqtt.messages import NO_CARRY, Decline
from edgefl.wire.mqtt.reasons import reason_text
from edgefl_server.coordinator.states import MOST_REASON, State

# Why a device declines a round, as a server may repeat it: what a device writes is not to be trusted.

_REASON = re.compile(rf"[a-z0-9-]{{1,{MOST_REASON}}}")


def reason_of(decline: Decline, *, carry_needed: bool) -> tuple[str, str]:
    """The reason, ``other`` where it is no word of ours or cannot be, and the text, printable.

    ``carry_needed``: whether the device's bundle needs what earlier rounds leave on a device.
    """
    text = reason_text(decline.reason, decline.text)
    if not _REASON.fullmatch(decline.reason):
        return "other", text
    if decline.reason == NO_CARRY and not carry_needed:
        return "other", f"{text} (it says {NO_CARRY!r}, and nothing of the kind is needed)"
    return decline.reason, text


RETURNS_S = 10.0
"""So many devices a second come again, of those that found no place."""


@dataclass(frozen=True)
class Ruling:
    """Whether a device is let in, and whose place it takes, if it takes one's."""

    admitted: bool
    instead_of: str = ""


class Admission:
    """One for a server; lots follow from the federation's ``seed``."""

    def __init__(self, seed: int, limits: Limits) -> None:
        self._seed = seed
        self._places = limits.max_devices
        self._least_s = limits.come_later_s
        self._most_told = limits.max_strangers
        self._highest: list[tuple[int, str]] | None = None
        self._told: OrderedDict[str, int] = OrderedDict()

    def lot(self, name: str) -> int:
        digest = hashlib.sha256(f"admit/{self._seed}/{name}".encode()).digest()
        return int.from_bytes(digest[:8], "big")

    def rule(self, name: str, state: State) -> Ruling:
        """On a device that is not in yet; it is from now on, if it is admitted."""
        ruling = self._ruling(name, state)
        if ruling.admitted:
            self._told.pop(name, None)
        return ruling

    def _ruling(self, name: str, state: State) -> Ruling:
        mine = (-self.lot(name), name)
        if len(state.devices) < self._places:
            if self._highest is not None:
                heapq.heappush(self._highest, mine)
            return Ruling(True)
        if self._highest is None:  # there was room so far
            self._highest = [(-self.lot(each), each) for each in state.devices]
            heapq.heapify(self._highest)
        highest = self._highest
        while highest and not _may_go(state, highest[0][1]):
            heapq.heappop(highest)
        if not highest or highest[0] > mine:
            return Ruling(False)
        return Ruling(True, heapq.heapreplace(highest, mine)[1])

    def later_s(self, name: str) -> float:
        """When a device that found no place, or lost it, is to come again, in seconds."""
        times = self._told.pop(name, 0) + 1
        self._told[name] = times
        if len(self._told) > self._most_told:
            self._told.popitem(last=False)
        window = max(self._least_s, len(self._told) / RETURNS_S)
        drawn = hashlib.sha256(f"later/{self._seed}/{name}/{times}".encode()).digest()[0] / 256
        return window * (1.0 + drawn)

    def kept(self, state: State, names: Iterable[str]) -> Collection[str]:
        """Those of ``names`` that have a place: of a server that is started again with a longer list than it takes."""
        ranked = sorted(names, key=lambda name: (_may_go(state, name), self.lot(name)))
        return frozenset(ranked[: self._places])


def _may_go(state: State, name: str) -> bool:
    """Whether it is there, and may lose its place: it never had a task."""
    tasks = state.round.assignments if state.round is not None else {}
    return name in state.devices and name not in state.record.of and name not in tasks
