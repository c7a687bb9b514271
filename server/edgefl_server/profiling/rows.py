"""State of each device while a fleet is profiled: its bundle, and the result. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import msgspec

from edgefl.errors import ConfigError
from edgefl.wire.bundle.archive import Bundle
from edgefl.wire.bundle.profiles import BundleProfile
from edgefl.wire.mqtt.messages import Hello
from edgefl_server.coordinator.roster import TierRule, tier_of

State = Literal["waiting", "measuring", "done", "declined", "silent", "late", "offline", "skipped", "unknown"]
FINAL = ("done", "declined", "skipped")
"""States that nothing changes any more."""

_UNKNOWN_NEED = 1 << 62


class DeviceReport(msgspec.Struct, frozen=True, kw_only=True):
    """One device: what it is, what it was asked, its profile or why there is none."""

    device: str
    tier: str = ""
    state: State = "waiting"
    reason: str = ""
    text: str = ""
    agent: str = ""
    engines: dict[str, str] = msgspec.field(default_factory=dict)
    memory_bytes: int = 0
    cores: int = 0
    profile: BundleProfile | None = None


class FleetReport(msgspec.Struct, frozen=True, kw_only=True):
    """All devices of a federation, by name."""

    federation: str
    seconds: float
    devices: tuple[DeviceReport, ...]

    @property
    def answered(self) -> tuple[DeviceReport, ...]:
        """Return the devices with a profile."""
        return tuple(row for row in self.devices if row.profile is not None)

    @property
    def silent(self) -> tuple[DeviceReport, ...]:
        """Return the devices without a profile."""
        return tuple(row for row in self.devices if row.profile is None)


@dataclass
class Row:
    """A device while it is asked. Times are the profiler's clock."""

    report: DeviceReport
    known: bool = False
    online: bool = False
    online_since: float | None = None
    offline_since: float | None = None
    asked_first: float | None = None
    asked_last: float = 0.0
    heard: bool = False

    def now(self, **changes: object) -> None:
        self.report = msgspec.structs.replace(self.report, **changes)

    @property
    def final(self) -> bool:
        return self.report.state in FINAL


Offered = Mapping[str, Mapping[str, Bundle]]
"""Bundles by tier and format."""


def by_tier(bundles: Iterable[Bundle]) -> Offered:
    """``bundles`` by tier and format; ConfigError if there are none, or several for the same."""
    bundles_by_tier: dict[str, dict[str, Bundle]] = {}
    for bundle in bundles:
        tier, kind = bundle.manifest.tier, bundle.manifest.format
        formats = bundles_by_tier.setdefault(tier, {})
        if kind in formats and formats[kind] != bundle:
            raise ConfigError(
                f"several bundles are for tier {tier!r} in format {kind}: name one of them",
                tier=tier,
                format=kind,
            )
        formats[kind] = bundle
    if not bundles_by_tier:
        raise ConfigError("there is no bundle to profile: name one, of a tier that there is")
    return bundles_by_tier


def tier_for(offered: Offered, device: str, hello: Hello) -> str:
    """Return the tier whose bundle a device is to measure, or "" if that is unknown.

    The only tier where one is offered; else the one that the device requests, the one in its name (``weak-3``),
    or the largest that fits its memory, where all say what they need.
    """
    if len(offered) == 1:
        return next(iter(offered))
    if hello.tier:
        return hello.tier if hello.tier in offered else ""
    needs = {
        tier: max(bundle.manifest.planned_bytes for bundle in bundles.values())
        for tier, bundles in offered.items()
    }
    known = all(needs.values())
    rules = [TierRule(tier, (f"{tier}-*",), need if known else _UNKNOWN_NEED) for tier, need in needs.items()]
    return tier_of(rules, device, hello.memory_bytes)
