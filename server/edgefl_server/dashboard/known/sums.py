"""Sums over the devices of a round."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median

from edgefl_server.dashboard.known.fleet import DeviceRound, RoundRecord, Sum

_FIELDS = {"accepted": "arrived", "rejected": "rejected", "declined": "declined", "missing": "missing"}


def sums_of(round_: RoundRecord) -> dict[str, Sum]:
    """Return the sums of a round by tier, in the order of their names. An old round has stored ones."""
    if not round_.parts:
        return round_.sums
    by_tier: dict[str, list[DeviceRound]] = {}
    for part in round_.parts.values():
        by_tier.setdefault(part.tier, []).append(part)
    return {tier: summed(by_tier[tier]) for tier in sorted(by_tier)}


def summed(parts: Iterable[DeviceRound]) -> Sum:
    """Return the sum of ``parts``."""
    made = Sum()
    arrived: list[DeviceRound] = []
    for part in parts:
        made.selected += 1
        made.staleness = max(made.staleness, part.staleness)
        if part.status in _FIELDS:
            name = _FIELDS[part.status]
            setattr(made, name, getattr(made, name) + 1)
        if part.reason:
            made.reasons[part.reason] = made.reasons.get(part.reason, 0) + 1
        if part.status == "accepted":
            arrived.append(part)
    made.down_bytes = sum(part.down_bytes for part in arrived)
    made.up_bytes = sum(part.up_bytes for part in arrived)
    made.seconds = _median(part.seconds for part in arrived)
    made.step_ms = _median(part.step_ms or None for part in arrived)
    made.used_bytes = int(_median(part.used_bytes or None for part in arrived) or 0)
    return made


def total(sums: Iterable[Sum]) -> Sum:
    """Return the sum of all tiers: counts and bytes only, as medians of tiers have no sum."""
    made = Sum()
    for each in sums:
        for name in ("selected", "arrived", "rejected", "declined", "missing", "down_bytes", "up_bytes"):
            setattr(made, name, getattr(made, name) + getattr(each, name))
        made.staleness = max(made.staleness, each.staleness)
        for reason, count in each.reasons.items():
            made.reasons[reason] = made.reasons.get(reason, 0) + count
    return made


def _median(values: Iterable[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return median(found) if found else None
