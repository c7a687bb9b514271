"""The tables of the page as rows, for JSON and CSV."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from server.dashboard.known.fleet import Entry, Part, Vital
from server.dashboard.shown import rows
from server.dashboard.shown.glance import Glance
from server.dashboard.shown.rows import DeviceRow, RoundRow, RunRow, TierRow, View


@dataclass(frozen=True)
class Listing:
    """Rows of one kind."""

    kind: type[msgspec.Struct]
    of: Callable[[Glance, View], list[Any]]


TABLES = {
    "run": Listing(RunRow, lambda glance, _: [rows.run_row(glance.fleet)]),
    "rounds": Listing(RoundRow, lambda glance, _: glance.rounds()[::-1]),
    "devices": Listing(
        DeviceRow,
        lambda glance, view: [rows.device_row(glance.fleet, each) for each in view.of(glance.fleet)],
    ),
    "tiers": Listing(TierRow, lambda glance, _: glance.tiers),
    "log": Listing(Entry, lambda glance, _: list(glance.fleet.log)),
    "vitals": Listing(Vital, lambda glance, _: list(glance.fleet.vitals)),
}


def of_device(name: str) -> Listing:
    """The rounds of a device."""

    def parts(glance: Glance, _: View) -> list[Any]:
        found = glance.fleet.devices.get(name)
        return [found.parts[number] for number in sorted(found.parts)] if found else []

    return Listing(Part, parts)


def of_round(number: int) -> Listing:
    """The devices of a round."""

    def parts(glance: Glance, _: View) -> list[Any]:
        found = glance.fleet.rounds.get(number)
        return [found.parts[name] for name in sorted(found.parts)] if found else []

    return Listing(Part, parts)


def log_of(name: str) -> Listing:
    """What was told of a device."""

    def entries(glance: Glance, _: View) -> list[Any]:
        found = glance.fleet.devices.get(name)
        return list(found.log) if found else []

    return Listing(Entry, entries)
