"""What personalization gave all users together: numbers for people and for programs. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from edgefl.analysis.charts.html import document, table
from edgefl.analysis.charts.svg import COUNT, FREE, SHARE, Span, line_chart
from edgefl.contract.options import at_least_zero
from edgefl.errors import ConfigError, DataError
from edgefl.wire.text import SHARES, metric_value
from edgefl_device.data import support
from edgefl_device.data.support import checked_protocol
from edgefl_device.personal.point import Point

STEPS = (0, 1, 2, 5, 10)
"""The curve over q that is reported beside the headline."""

BATCH = 40
"""The paper's."""

DECILE = 0.1


@dataclass(frozen=True)
class UserReport:
    """One user. ``samples`` is what it weighs in the weighted mean (its train shard, else its test shard), ``support`` and
    ``query`` are numbers of rows, ``majority`` is the accuracy of its own most frequent class, where each label is one."""

    number: int
    name: str
    group: str
    samples: int
    support: int
    query: int
    leaks: bool
    majority: float | None
    curve: tuple[Point, ...]

    def after(self, steps: int) -> Point:
        return next(point for point in self.curve if point.steps == steps)

    @property
    def metric(self) -> str:
        """What people are shown first: a metric of the task, or the loss."""
        return self.curve[0].metric

    @property
    def before(self) -> float:
        """:attr:`metric` without a step."""
        return self.curve[0].value(self.metric)

    def value(self, steps: int) -> float:
        """:attr:`metric` after ``steps``."""
        return self.after(steps).value(self.metric)


@dataclass(frozen=True)
class Setting:
    """How users are evaluated: the same for all that are compared.

    ``headline`` is the q of the headline, ``steps`` those of the curve, to which it and 0 are added. ConfigError for values
    out of range.
    """

    alpha: float
    steps: tuple[int, ...] = STEPS
    batch: int = BATCH
    protocol: support.Protocol = "train_support"
    seed: int = 0
    headline: int = 1

    def __post_init__(self) -> None:
        at_least_zero("personalization", alpha=self.alpha)
        checked_protocol(self.protocol)
        wrong = [q for q in (*self.steps, self.headline) if q < 0]
        if wrong or self.batch < 1 or self.seed < 0:
            raise ConfigError(
                f"personalization takes steps and a seed from 0 and a batch from 1, found steps "
                f"{list((*self.steps, self.headline))}, seed {self.seed}, batch {self.batch}",
                steps=self.steps,
                seed=self.seed,
                batch=self.batch,
            )

    @property
    def curve(self) -> tuple[int, ...]:
        return tuple(sorted({0, self.headline, *self.steps}))


@dataclass(frozen=True)
class PersonalReport:
    """All users under one protocol, by the ``metric`` of their task, all users alike unless it says otherwise.

    ``mean`` is the headline: after ``steps`` steps; ``before`` that without one. ``std`` is over users, of the population;
    ``worst_decile`` the mean of the tenth of the users (at least one) that fare worst, ``weighted`` the mean by samples.
    ``majority`` is the accuracy of each user's own most frequent class, the level below which a method has learned nothing;
    None for other metrics.
    ``groups`` has the means of groups of users. ``left_out`` names users that could not be evaluated, and why.
    ``leaks``: samples that judge were adapted to.
    """

    protocol: support.Protocol
    leaks: bool
    note: str
    alpha: float
    batch: int
    steps: int
    seed: int
    metric: str
    mean: float
    before: float
    std: float
    worst_decile: float
    weighted: float
    majority: float | None
    majority_weighted: float | None
    groups: Mapping[str, float]
    curve: tuple[Point, ...]
    users: tuple[UserReport, ...]
    left_out: Mapping[str, str]


def summed_up(
    setting: Setting, users: Sequence[UserReport], left_out: Mapping[str, str] | None = None
) -> PersonalReport:
    """The report of these ``users``. DataError without any."""
    if not users:
        reasons = "; ".join(f"{name}: {why}" for name, why in (left_out or {}).items())
        raise DataError(f"there is no user to evaluate{': ' if reasons else ''}{reasons}", left_out=left_out)
    metric = users[0].metric
    after = [user.value(setting.headline) for user in users]
    samples = [user.samples for user in users]
    majority = [user.majority for user in users if user.majority is not None]
    known = len(majority) == len(users) and metric == "accuracy"
    return PersonalReport(
        protocol=setting.protocol,
        leaks=any(user.leaks for user in users),
        note=support.NOTES[setting.protocol],
        alpha=setting.alpha,
        batch=setting.batch,
        steps=setting.headline,
        seed=setting.seed,
        metric=metric,
        mean=mean(after),
        before=mean([user.before for user in users]),
        std=math.sqrt(mean([(value - mean(after)) ** 2 for value in after])),
        worst_decile=worst_decile(after, more_is_better=metric in SHARES),
        weighted=mean(after, samples),
        majority=mean(majority) if known else None,
        majority_weighted=mean(majority, samples) if known else None,
        groups={
            group: mean([value for value, user in zip(after, users, strict=True) if user.group == group])
            for group in sorted({user.group for user in users if user.group})
        },
        curve=tuple(_mean_point([user.after(point.steps) for user in users]) for point in users[0].curve),
        users=tuple(users),
        left_out=dict(left_out or {}),
    )


def mean(values: Sequence[float], weights: Sequence[float] | None = None) -> float:
    """The (weighted) mean, exactly rounded, so that it depends on no order."""
    shares = [1.0] * len(values) if weights is None else weights
    return math.fsum(value * share for value, share in zip(values, shares, strict=True)) / math.fsum(shares)


def worst_decile(values: Sequence[float], *, more_is_better: bool = True) -> float:
    """The mean of the worst tenth, rounded up to whole users."""
    return mean(sorted(values, reverse=not more_is_better)[: math.ceil(len(values) * DECILE - 1e-9)])


def _mean_point(points: Sequence[Point]) -> Point:
    return Point(
        steps=points[0].steps,
        loss=mean([point.loss for point in points]),
        metrics={name: mean([point.metrics[name] for point in points]) for name in points[0].metrics},
    )


def page(title: str, reports: Sequence[PersonalReport]) -> str:
    """The page of ``reports``, the first of which is the headline; ValueError without one."""
    if not reports:
        raise ValueError(f"the page {title!r} has no report to show")
    first = reports[0]
    parts = [
        table(summary(reports)),
        *(f"<p><b>{report.protocol}</b>: {escape(report.note)}</p>" for report in reports),
        _curve(reports),
        _users(first),
        f"<h2>Users, {first.protocol}</h2>",
        table(user_rows(first)),
    ]
    left = [f"<li>{escape(name)}: {escape(why)}</li>" for name, why in first.left_out.items()]
    if left:
        parts.append(f"<h2>Left out</h2><ul>{''.join(left)}</ul>")
    return document(title, parts)


def summary(reports: Sequence[PersonalReport]) -> list[dict[str, str]]:
    """A line for each number, a column for each of ``reports``, which differ in their protocols."""
    columns = {report.protocol + (" (leaks)" if report.leaks else ""): _numbers(report) for report in reports}
    names = next(iter(columns.values()))
    return [
        {reports[0].metric: name} | {column: numbers[name] for column, numbers in columns.items()}
        for name in names
    ]


def _numbers(report: PersonalReport) -> dict[str, str]:
    after = "1 step" if report.steps == 1 else f"{report.steps} steps"
    values: dict[str, float | None] = {
        "before": report.before,
        f"after {after}": report.mean,
        "std over users": report.std,
        "worst tenth of users": report.worst_decile,
        "mean by samples": report.weighted,
        **{f"group {group}": value for group, value in report.groups.items()},
        "own majority class": report.majority,
        "own majority class, by samples": report.majority_weighted,
    }
    return {
        name: "-" if value is None else metric_value(report.metric, value, 2)
        for name, value in values.items()
        if value is not None or "majority" not in name
    }


def user_rows(report: PersonalReport) -> list[dict[str, str]]:
    """A line for each user, those that fare worst first."""
    shares, metric = report.metric in SHARES, report.metric
    ordered = sorted(report.users, key=lambda user: user.value(report.steps), reverse=not shares)
    return [
        {
            "user": user.name,
            "samples": str(user.samples),
            "support": str(user.support),
            "query": str(user.query),
            "before": metric_value(metric, user.before, 2),
            "after": metric_value(metric, user.value(report.steps), 2),
            **({} if user.majority is None else {"own majority": f"{user.majority:.2%}"}),
        }
        for user in ordered
    ]


def _curve(reports: Sequence[PersonalReport]) -> str:
    lines: dict[str, list[tuple[float, float]]] = {
        report.protocol: [(float(point.steps), point.value(report.metric)) for point in report.curve]
        for report in reports
    }
    metric = reports[0].metric
    title = f"Mean {metric} over users"
    return line_chart(lines, title=title, x="steps", y=metric, x_span=COUNT, y_span=_span(metric))


def _span(metric: str) -> Span:
    return SHARE if metric in SHARES else FREE


def _users(report: PersonalReport) -> str:
    """Users in the order of their metric, before and after: who gains, and who is left behind."""

    def ranked(values: Sequence[float]) -> list[tuple[float, float]]:
        return [(float(rank), value) for rank, value in enumerate(sorted(values), 1)]

    lines = {
        "before": ranked([user.before for user in report.users]),
        "after": ranked([user.value(report.steps) for user in report.users]),
    }
    own = [user.majority for user in report.users if user.majority is not None]
    if own and report.metric == "accuracy":
        lines["own majority"] = ranked(own)
    title = f"Users by {report.metric}, {report.protocol}"
    return line_chart(
        lines, title=title, x="users", y=report.metric, x_span=COUNT, y_span=_span(report.metric)
    )
