"""Snapshot of a fleet that all open pages share, with its rows and charts."""

from __future__ import annotations

from statistics import mean

import msgspec

from edgefl_server.dashboard.known.fleet import Fleet, Vital
from edgefl_server.dashboard.shown import rows
from edgefl_server.dashboard.shown.rows import RoundSummary, TierRow

_BINS = 24


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """Round in the charts. ``tiers``: by tier, median seconds until the report, bytes up and bytes down."""

    round: int
    over: bool
    score: float | None
    loss: float | None
    train_loss: float | None
    selected: int
    arrived: int
    lacking: int
    late: int
    tiers: dict[str, tuple[float | None, int, int]]


class Histogram(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of values in bins of equal ``width``, the first of which starts at ``low``."""

    round: int
    low: float
    width: float
    counts: list[int]


class Charts(msgspec.Struct, frozen=True, kw_only=True):
    """Data of all charts. ``points`` and ``vitals`` are only the new ones in this ``edition`` of the fleet."""

    edition: int
    metric: str
    points: list[Point]
    vitals: list[Vital]
    seconds: Histogram
    step_ms: Histogram
    staleness: dict[int, int]


class Glance:
    """A fleet, and a cache of the rows and charts that are derived from it."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self._rounds: dict[int, tuple[int, RoundSummary]] = {}
        self._tick = 0
        self._tiers: list[TierRow] = []
        self._seconds = self._step_ms = histogram(0, [])
        self._staleness: dict[int, int] = {}

    def rounds(self, last: int | None = None, since: int = 0) -> list[RoundSummary]:
        """Return those of the ``last`` rounds, all by default, that changed after tick ``since``; the newest first."""
        numbers = sorted(self.fleet.rounds, reverse=True)[:last]
        return [self.round(number) for number in numbers if self.fleet.rounds[number].changed > since]

    def round(self, number: int) -> RoundSummary:
        found = self.fleet.rounds[number]
        known = self._rounds.get(number)
        if known is None or known[0] != found.changed or found.changed == self.fleet.tick:
            known = self._rounds[number] = found.changed, rows.round_row(found)
        return known[1]

    @property
    def tiers(self) -> list[TierRow]:
        self._look()
        return self._tiers

    def charts(self, since: int = 0, vitals_since: int = 0) -> Charts:
        """Return the changes after a tick. ``vitals_since``: number of the last vitals that the page has."""
        self._look()
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

    def _look(self) -> None:
        if self._tick == self.fleet.tick:
            return
        self._tick = self.fleet.tick
        number, seconds, step_ms = rows.times(self.fleet)
        self._tiers = rows.tier_rows(self.fleet)
        self._seconds, self._step_ms = histogram(number, seconds), histogram(number, step_ms)
        self._staleness = rows.staleness(self.fleet)


def point(row: RoundSummary) -> Point:
    return Point(
        round=row.round,
        over=row.state != "open",
        score=row.metrics.get(row.metric) if row.metric != "loss" else row.loss,
        loss=row.loss,
        train_loss=row.train_loss,
        selected=row.selected,
        arrived=row.arrived,
        lacking=row.declined + row.rejected + row.missing,
        late=row.late,
        tiers={name: (each.seconds, each.up_bytes, each.down_bytes) for name, each in row.tiers.items()},
    )


def histogram(number: int, values: list[float]) -> Histogram:
    """Return the histogram of ``values`` of round ``number``."""
    if not values:
        return Histogram(round=number, low=0.0, width=0.0, counts=[])
    low, high = min(values), max(values)
    bins = min(_BINS, max(5, round(2 * len(values) ** 0.5)))
    width = (high - low) / bins or max(abs(mean(values)), 1.0) / bins
    counts = [0] * bins
    for value in values:
        counts[min(bins - 1, int((value - low) / width))] += 1
    return Histogram(round=number, low=low, width=width, counts=counts)
