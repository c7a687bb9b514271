"""Reports of personalization as one page that needs nothing else: charts, tables, and what each protocol means."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from edgefl.analysis.charts.html import document, table
from edgefl.analysis.charts.svg import COUNT, FREE, SHARE, Span, line_chart
from edgefl.analysis.personal.report import PersonalReport
from edgefl.wire.metric_text import SHARES, number


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
        name: "-" if value is None else number(report.metric, value, 2)
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
            "before": number(metric, user.before, 2),
            "after": number(metric, user.value(report.steps), 2),
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
