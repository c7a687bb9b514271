"""Summary of a fleet as rows for tables, CSV, JSON and charts, and the snapshot that all open pages share."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

import msgspec

from edgefl_server.dashboard.state.fleet import (
    DeviceRecord,
    DeviceRound,
    Fleet,
    RoundRecord,
    TierTotals,
    VitalSample,
)
from edgefl_server.dashboard.state.fold import sums_of, total
from edgefl_server.events import DeviceEvaluation, GroupResult

STATES = ("working", "reported", "declined", "rejected", "missing", "idle", "offline")
SILENT_S = 20.0
"""Longest pause between the events of a server that runs."""
PAGE = 50
"""Devices on a page."""


class RunRow(msgspec.Struct, frozen=True, kw_only=True):
    """Summary of the run for the headline, the tables and the exports.

    ``silent_s`` is the number of seconds since the last event of the server; None before the first event.
    ``device_metric`` is the main ``metric`` of the newest evaluation on devices, over all their rows.
    """

    federation: str
    run: str
    phase: str
    paused: bool
    text: str
    round: int
    rounds: int
    devices: int
    online: int
    working: int
    accuracy: float | None
    loss: float | None
    metric: str
    device_metric: float | None
    broker: str
    broker_offline: bool
    processor: str
    silent_s: float | None
    checkpoints: tuple[int, ...]
    problem: str


class RoundSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Summary of a round. ``late`` counts updates after its end; ``reasons`` counts missing updates by reason.

    ``evaluates`` is True if devices evaluate the model in the round, or measure statistics for that (``measures``), and
    ``evaluation`` has their results.
    """

    round: int
    state: str
    selected: int
    arrived: int
    rejected: int
    declined: int
    missing: int
    late: int
    reasons: dict[str, int]
    goal: int
    opened: float
    deadline: float
    seconds: float | None
    accuracy: float | None
    loss: float | None
    train_loss: float | None
    metric: str
    metrics: dict[str, float]
    down_bytes: int
    up_bytes: int
    server_down_bytes: int
    staleness: int
    weights_sha256: str
    text: str
    tiers: dict[str, TierTotals]
    evaluates: bool
    measures: bool
    evaluation: DeviceEvaluation | None


class EvaluationRow(msgspec.Struct, frozen=True, kw_only=True):
    """Value of one metric in an evaluation round, for a tier; ``tier`` is "" for all devices.

    ``value`` is over all rows together, ``median`` and ``worst_decile`` over the devices. ``histogram`` counts devices
    by the main metric in ten bins from 0 to 1; it is empty for other metrics.
    """

    round: int
    trained_rounds: int
    tier: str
    devices: int
    rows: float
    metric: str
    value: float
    median: float | None
    worst_decile: float | None
    histogram: tuple[int, ...]


class TierRow(msgspec.Struct, frozen=True, kw_only=True):
    """Summary of a tier: its devices, and figures of their newest accepted updates.

    Memory is that over the idle process: as planned by the exporter, and as measured by devices (median and maximum).
    The other figures are medians. ``device_metric`` is the main ``metric`` of the tier in the newest evaluation on
    devices.
    """

    tier: str
    devices: int
    online: int
    planned_bytes: int
    used_bytes: int
    most_used_bytes: int
    seconds: float | None
    step_ms: float | None
    down_bytes: int
    up_bytes: int
    metric: str
    device_metric: float | None


class DeviceRow(msgspec.Struct, frozen=True, kw_only=True):
    """Summary of a device. ``seconds``, ``staleness`` and the bytes describe its last accepted update."""

    device: str
    tier: str
    state: str
    round: int
    stage: str
    step: int
    steps: int
    loss: float | None
    step_ms: float
    seconds: float | None
    used_bytes: int
    down_bytes: int
    up_bytes: int
    staleness: int
    reports: int
    missed: int
    seen: float


@dataclass(frozen=True)
class DeviceFilter:
    """Filter of devices by a part ``q`` of the name, by tier and by state; "" matches all. ``page`` counts from 1."""

    q: str = ""
    tier: str = ""
    state: str = ""
    page: int = 1

    def of(self, fleet: Fleet) -> list[DeviceRecord]:
        """Return the devices of ``fleet`` that match this filter, sorted by name, for all pages together."""
        wanted = self.q.casefold()
        return [
            device
            for name, device in sorted(fleet.devices.items())
            if (not wanted or wanted in name.casefold())
            and (not self.tier or device.tier == self.tier)
            and (not self.state or state_of(fleet, device) == self.state)
        ]


def state_of(fleet: Fleet, device: DeviceRecord) -> str:
    """Return the state of a device in the run's current round, one of :data:`STATES`."""
    if not device.online:
        return "offline"
    part = device.parts.get(fleet.current) if fleet.phase == "open" else None
    if part is None and fleet.phase in ("open", "waiting"):
        part = device.at_work
    if part is None:
        return "idle"
    return {"open": "working", "accepted": "reported"}.get(part.status, part.status)


def run_row(fleet: Fleet, now: float | None = None) -> RunRow:
    """Return the summary of the run. ``now`` is in epoch seconds; None uses the clock."""
    now = time.time() if now is None else now
    states = [state_of(fleet, device) for device in fleet.devices.values()]
    scored = next((row for _, row in sorted(fleet.rounds.items(), reverse=True) if row.metrics), None)
    evaluated = newest_evaluation(fleet)
    on_devices = evaluated.devices if evaluated is not None else None
    numbers = {
        "round": max(fleet.rounds, default=0),
        "rounds": fleet.total,
        "devices": len(states),
        "online": sum(state != "offline" for state in states),
        "working": states.count("working"),
        "accuracy": scored.accuracy if scored else None,
        "loss": scored.loss if scored else None,
        "metric": evaluated.metric if evaluated else scored.metric if scored else "",
        "device_metric": on_devices.metrics.get(evaluated.metric) if evaluated and on_devices else None,
        "broker_offline": fleet.offline,
        "silent_s": max(0.0, now - fleet.told) if fleet.told else None,
    }
    return RunRow(**_fields_of(fleet, RunRow) | numbers)


def round_row(row: RoundRecord) -> RoundSummary:
    """Return the summary of a round, with totals over its devices and by tier."""
    sums = sums_of(row)
    whole = total(sums.values())
    counts = {
        "round": row.number,
        "arrived": max(whole.arrived, row.reports),
        "late": sum(row.late.values()),
        "down_bytes": row.down_bytes or whole.down_bytes,
        "up_bytes": row.up_bytes or whole.up_bytes,
        "tiers": sums,
    }
    return RoundSummary(**_fields_of(whole, RoundSummary) | _fields_of(row, RoundSummary) | counts)


def newest_evaluation(fleet: Fleet) -> DeviceEvaluation | None:
    """Return the results of the newest evaluation round, without rounds that an operator undid; None if there is none."""
    evaluations = (
        row.evaluation for _, row in sorted(fleet.rounds.items(), reverse=True) if row.state != "undone"
    )
    return next((found for found in evaluations if found is not None), None)


def evaluation_rows(fleet: Fleet) -> list[EvaluationRow]:
    """Return a row for each evaluation round, group and metric, in the order of the rounds, all devices first."""
    return [
        EvaluationRow(
            round=number,
            trained_rounds=found.trained_rounds,
            tier=tier,
            devices=group.devices,
            rows=group.rows,
            metric=name,
            value=value,
            median=group.median.get(name),
            worst_decile=group.worst_decile.get(name),
            histogram=group.histogram if name == found.metric else (),
        )
        for number, row in sorted(fleet.rounds.items())
        if (found := row.evaluation) is not None
        for tier, group in groups_of(found).items()
        for name, value in group.metrics.items()
    ]


def groups_of(found: DeviceEvaluation) -> dict[str, GroupResult]:
    """Return the results of an evaluation by tier; "" is all devices, and comes first."""
    return ({} if found.devices is None else {"": found.devices}) | found.tiers


def device_row(fleet: Fleet, device: DeviceRecord) -> DeviceRow:
    """Return the summary of a device, with the figures of its last accepted update."""
    last = last_report(fleet, device) or DeviceRound(device=device.name, round=0)
    report = {
        name: getattr(last, name) for name in ("seconds", "used_bytes", "down_bytes", "up_bytes", "staleness")
    }
    named = {"device": device.name, "state": state_of(fleet, device)}
    return DeviceRow(**_fields_of(device, DeviceRow) | report | named)


def _fields_of(source: msgspec.Struct, row: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the fields of ``source`` that ``row`` has under the same names."""
    return {name: getattr(source, name) for name in source.__struct_fields__ if name in row.__struct_fields__}


def tier_rows(fleet: Fleet) -> list[TierRow]:
    """Return a row for each tier that has a bundle or a device, sorted by name."""
    members: dict[str, list[DeviceRecord]] = {name: [] for name in fleet.tiers}
    for device in fleet.devices.values():
        members.setdefault(device.tier, []).append(device)
    return [_tier_row(fleet, name, members[name]) for name in sorted(members)]


def _tier_row(fleet: Fleet, name: str, devices: list[DeviceRecord]) -> TierRow:
    reports = [last for device in devices if (last := last_report(fleet, device)) is not None]
    used = [part.used_bytes for part in reports if part.used_bytes]
    evaluated = newest_evaluation(fleet)
    group = evaluated.tiers.get(name) if evaluated is not None else None
    return TierRow(
        tier=name,
        devices=len(devices),
        online=sum(device.online for device in devices),
        planned_bytes=fleet.tiers[name].planned_bytes if name in fleet.tiers else 0,
        used_bytes=int(median(used)) if used else 0,
        most_used_bytes=max(used, default=0),
        seconds=_median(part.seconds for part in reports),
        step_ms=_median(part.step_ms or None for part in reports),
        down_bytes=int(_median(part.down_bytes for part in reports) or 0),
        up_bytes=int(_median(part.up_bytes for part in reports) or 0),
        metric=evaluated.metric if evaluated is not None else "",
        device_metric=group.metrics.get(evaluated.metric) if evaluated and group else None,
    )


def last_report(fleet: Fleet, device: DeviceRecord) -> DeviceRound | None:
    """Return the state of a device in the newest training round that accepted its update; None if there is none."""
    for number in reversed(device.parts):
        if device.parts[number].status == "accepted" and not fleet.rounds[number].evaluates:
            return device.parts[number]
    return None


def times(fleet: Fleet) -> tuple[int, list[float], list[float]]:
    """Return times of the newest training round that has accepted updates.

    Returns:
        (number of the round, seconds until each accepted update, milliseconds of a training step on each device). The
        lists may differ in length, because a device may not report a step time. (0, [], []) if no round has an
        accepted update.
    """
    for number, row in sorted(fleet.rounds.items(), reverse=True):
        arrived = [part for part in row.parts.values() if part.status == "accepted"]
        if arrived and not row.evaluates:
            seconds = [part.seconds for part in arrived if part.seconds is not None]
            return number, seconds, [part.step_ms for part in arrived if part.step_ms]
    return 0, [], []


def staleness(fleet: Fleet, last: int = 20) -> dict[int, int]:
    """Return the number of updates of the ``last`` rounds by staleness (versions behind when they were accepted).

    It is an empty dict if no update was stale.
    """
    counts: dict[int, int] = {}
    for number in sorted(fleet.rounds)[-last:]:
        for part in fleet.rounds[number].parts.values():
            if part.status == "accepted" or part.staleness:
                counts[part.staleness] = counts.get(part.staleness, 0) + 1
    return dict(sorted(counts.items())) if any(counts) else {}


def _median(values: Iterable[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return median(found) if found else None


_BINS = 24


class RoundPoint(msgspec.Struct, frozen=True, kw_only=True):
    """Values of one round for the charts.

    ``tiers``: by tier, (median seconds until the update, bytes up, bytes down). ``devices``: in an evaluation round,
    the metric on the devices' rows, its median over the devices, and the worst decile.
    """

    round: int
    evaluates: bool
    over: bool
    score: float | None
    loss: float | None
    train_loss: float | None
    selected: int
    arrived: int
    lacking: int
    late: int
    tiers: dict[str, tuple[float | None, int, int]]
    devices: tuple[float | None, float | None, float | None] | None


class Histogram(msgspec.Struct, frozen=True, kw_only=True):
    """Histogram of values of one round: counts in bins of equal ``width``, the first of which starts at ``low``."""

    round: int
    low: float
    width: float
    counts: list[int]


class Charts(msgspec.Struct, frozen=True, kw_only=True):
    """Data of all charts.

    ``points`` (by round) and ``vitals`` contain only values that the page does not have yet; the rest is complete.
    """

    edition: int
    metric: str
    points: list[RoundPoint]
    vitals: list[VitalSample]
    seconds: Histogram
    step_ms: Histogram
    staleness: dict[int, int]


class FleetSnapshot:
    """Fleet with a cache of the rows and charts computed from it, which all open pages share."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self._rounds: dict[int, tuple[int, RoundSummary]] = {}
        self._tick = 0
        self._tiers: list[TierRow] = []
        self._seconds = self._step_ms = histogram(0, [])
        self._staleness: dict[int, int] = {}

    def rounds(self, last: int | None = None, since: int = 0) -> list[RoundSummary]:
        """Return summaries of those among the ``last`` rounds (None: all) that changed after tick ``since``, the
        newest first.
        """
        numbers = sorted(self.fleet.rounds, reverse=True)[:last]
        return [self.round(number) for number in numbers if self.fleet.rounds[number].changed > since]

    def round(self, number: int) -> RoundSummary:
        """Return the summary of round ``number``. It is computed again only if the round changed.

        Raises:
            KeyError: If there is no such round.
        """
        found = self.fleet.rounds[number]
        known = self._rounds.get(number)
        if known is None or known[0] != found.changed or found.changed == self.fleet.tick:
            known = self._rounds[number] = found.changed, round_row(found)
        return known[1]

    @property
    def tiers(self) -> list[TierRow]:
        """Summaries of the tiers, computed once per tick."""
        self._refresh()
        return self._tiers

    def charts(self, since: int = 0, vitals_since: int = 0) -> Charts:
        """Return the chart data: all of it, except that rounds are limited to those that changed after tick ``since``.

        ``vitals_since`` is the number of the last vital sample that the page has; only later ones are included.
        """
        self._refresh()
        points = [point(row) for row in reversed(self.rounds(since=since))]
        return Charts(
            edition=self.fleet.edition,
            metric=next((row.metric for row in self.rounds(last=3) if row.metric), "accuracy"),
            points=points,
            vitals=[each for each in self.fleet.vitals if each.n > vitals_since],
            seconds=self._seconds,
            step_ms=self._step_ms,
            staleness=self._staleness,
        )

    def _refresh(self) -> None:
        if self._tick == self.fleet.tick:
            return
        self._tick = self.fleet.tick
        number, seconds, step_ms = times(self.fleet)
        self._tiers = tier_rows(self.fleet)
        self._seconds, self._step_ms = histogram(number, seconds), histogram(number, step_ms)
        self._staleness = staleness(self.fleet)


def point(row: RoundSummary) -> RoundPoint:
    """Return the values of a round that the charts show."""
    found, devices = row.evaluation, None
    if found is not None and (group := found.devices) is not None:
        names = (group.metrics, group.median, group.worst_decile)
        whole, median_, worst = (values.get(found.metric) for values in names)
        devices = whole, median_, worst
    return RoundPoint(
        round=row.round,
        evaluates=row.evaluates,
        over=row.state != "open",
        score=row.metrics.get(row.metric) if row.metric != "loss" else row.loss,
        loss=row.loss,
        train_loss=row.train_loss,
        selected=row.selected,
        arrived=row.arrived,
        lacking=row.declined + row.rejected + row.missing,
        late=row.late,
        tiers={name: (each.seconds, each.up_bytes, each.down_bytes) for name, each in row.tiers.items()},
        devices=devices,
    )


def histogram(number: int, values: list[float]) -> Histogram:
    """Return the histogram of ``values``, which are of round ``number``. Without values it has no bins."""
    if not values:
        return Histogram(round=number, low=0.0, width=0.0, counts=[])
    low, high = min(values), max(values)
    bins = min(_BINS, max(5, round(2 * len(values) ** 0.5)))
    width = (high - low) / bins or max(abs(mean(values)), 1.0) / bins
    counts = [0] * bins
    for value in values:
        counts[min(bins - 1, int((value - low) / width))] += 1
    return Histogram(round=number, low=low, width=width, counts=counts)
