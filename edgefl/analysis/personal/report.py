"""Reports on personalization: numbers over all users, their tables and page. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from edgefl.analysis.charts import COUNT, FREE, SHARE, AxisRange, html_page, html_table, line_chart
from edgefl.contract.options import check_not_negative
from edgefl.errors import ConfigError, DataError
from edgefl.wire.text import SHARES, metric_value
from edgefl_device.data import support
from edgefl_device.data.support import checked_protocol
from edgefl_device.personal.personalize import AdaptationPoint

STEPS = (0, 1, 2, 5, 10)
"""Default numbers of steps of the curve."""

BATCH = 40
"""The paper's batch."""

DECILE = 0.1


@dataclass(frozen=True)
class UserReport:
    """Evaluation of one user.

    Attributes:
        number: number of the user.
        name: name of the user.
        group: class of users, or empty.
        samples: weight in the weighted mean: rows of the train shard, else of the test shard.
        support: rows that the user adapts to.
        query: rows that the user is judged on.
        leaks: True if judged rows were adapted to.
        majority: accuracy of the user's own commonest class; None if a label is not one class.
        curve: metrics by number of steps.
    """

    number: int
    name: str
    group: str
    samples: int
    support: int
    query: int
    leaks: bool
    majority: float | None
    curve: tuple[AdaptationPoint, ...]

    def after(self, steps: int) -> AdaptationPoint:
        """Return the metrics after ``steps`` steps, which must be one of the numbers of steps in ``curve``."""
        return next(point for point in self.curve if point.steps == steps)

    @property
    def metric(self) -> str:
        """Name of the headline metric: the first metric of the task, or ``loss`` if it has none."""
        return self.curve[0].metric

    @property
    def before(self) -> float:
        """Value of :attr:`metric` before any step."""
        return self.curve[0].value(self.metric)

    def value(self, steps: int) -> float:
        """Return the value of :attr:`metric` after ``steps`` steps."""
        return self.after(steps).value(self.metric)


@dataclass(frozen=True)
class EvaluationSetting:
    """Protocol of an evaluation, the same for all compared methods.

    Attributes:
        alpha: step size of the adaptation.
        steps: numbers of steps at which users are evaluated.
        batch: samples per step.
        protocol: split of a user's samples into support (adapted to) and query (judged).
        seed: seed of splits and batches.
        headline: number of steps whose metrics are reported first.

    Raises:
        ConfigError: if a value is out of range.
    """

    alpha: float
    steps: tuple[int, ...] = STEPS
    batch: int = BATCH
    protocol: support.Protocol = "train_support"
    seed: int = 0
    headline: int = 1

    def __post_init__(self) -> None:
        check_not_negative("personalization", alpha=self.alpha)
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
        """All evaluated numbers of steps, ascending: ``steps``, ``headline`` and 0."""
        return tuple(sorted({0, self.headline, *self.steps}))


@dataclass(frozen=True)
class PersonalReport:
    """Metrics over all users under one protocol, by the ``metric`` of their task. Users have equal weight unless noted.

    Attributes:
        protocol: split of a user's samples.
        leaks: True if judged rows were adapted to.
        note: description of the protocol.
        alpha: step size.
        batch: samples per step.
        steps: number of steps of the headline.
        seed: seed of the batches.
        metric: name of the metric.
        mean: the headline, after ``steps`` steps.
        before: the mean before any step.
        std: standard deviation over the population of users.
        worst_decile: mean of the worst tenth of the users, at least one.
        weighted: mean weighted by samples.
        majority: mean accuracy of always predicting the user's most frequent class; None for other metrics.
        majority_weighted: the same, weighted by samples.
        groups: means of the groups of users, by group.
        curve: means by number of steps.
        users: the users' reports.
        left_out: reasons by the name of each user that could not be evaluated.
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
    curve: tuple[AdaptationPoint, ...]
    users: tuple[UserReport, ...]
    left_out: Mapping[str, str]


def summarize(
    setting: EvaluationSetting, users: Sequence[UserReport], left_out: Mapping[str, str] | None = None
) -> PersonalReport:
    """Return the report over all users.

    Args:
        setting: the protocol.
        users: the users' reports.
        left_out: reasons by the name of each user that could not be evaluated.

    Returns:
        The means, deviations and curve.

    Raises:
        DataError: if there is no user.
    """
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
    """Return the mean of ``values``, weighted if ``weights`` are given. It is rounded once, so it does not depend on the
    order.
    """
    shares = [1.0] * len(values) if weights is None else weights
    return math.fsum(value * share for value, share in zip(values, shares, strict=True)) / math.fsum(shares)


def worst_decile(values: Sequence[float], *, more_is_better: bool = True) -> float:
    """Return the mean of the worst tenth of ``values``. The number of values in the tenth is rounded up.

    ``more_is_better``: True if the lowest values are the worst; False for a loss.
    """
    return mean(sorted(values, reverse=not more_is_better)[: math.ceil(len(values) * DECILE - 1e-9)])


def _mean_point(points: Sequence[AdaptationPoint]) -> AdaptationPoint:
    return AdaptationPoint(
        steps=points[0].steps,
        loss=mean([point.loss for point in points]),
        metrics={name: mean([point.metrics[name] for point in points]) for name in points[0].metrics},
    )


def page(title: str, reports: Sequence[PersonalReport]) -> str:
    """Return the HTML page of reports, the first of which is the headline.

    Args:
        title: title of the page.
        reports: reports that differ in their protocols.

    Returns:
        The page's text.

    Raises:
        ValueError: if there is no report.
    """
    if not reports:
        raise ValueError(f"the page {title!r} has no report to show")
    first = reports[0]
    parts = [
        html_table(summary(reports)),
        *(f"<p><b>{report.protocol}</b>: {escape(report.note)}</p>" for report in reports),
        _curve(reports),
        _users(first),
        f"<h2>Users, {first.protocol}</h2>",
        html_table(user_rows(first)),
    ]
    left = [f"<li>{escape(name)}: {escape(why)}</li>" for name, why in first.left_out.items()]
    if left:
        parts.append(f"<h2>Left out</h2><ul>{''.join(left)}</ul>")
    return html_page(title, parts)


def summary(reports: Sequence[PersonalReport]) -> list[dict[str, str]]:
    """Return the rows of a table that compares reports under different protocols.

    A row has the name of a number under the metric's name, and its values under the protocols' names.
    """
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
    """Return a row of texts per user by column, the worst user first."""
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


def _span(metric: str) -> AxisRange:
    return SHARE if metric in SHARES else FREE


def _users(report: PersonalReport) -> str:
    """Return an SVG chart of the users' metrics in ascending order, before and after adaptation."""

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
