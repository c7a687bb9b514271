"""Parts of a page, each of which is sent again when it changes."""

from __future__ import annotations

import time
from urllib.parse import urlencode

from edgefl.system.sizes import size
from edgefl.wire.text import count_text, metric_value
from edgefl_server.dashboard.state.fleet import DeviceRound, Fleet, LogEntry
from edgefl_server.dashboard.views.html import (
    Child,
    Html,
    TableColumn,
    device_path,
    el,
    join_children,
    link,
    row,
    table,
)
from edgefl_server.dashboard.views.summary import (
    SILENT_S,
    DeviceRow,
    RoundSummary,
    RunRow,
    TierRow,
    groups_of,
)
from edgefl_server.events import DeviceEvaluation, GroupResult


def _texts(*names: str) -> list[TableColumn]:
    return [TableColumn(name) for name in names]


def _numbers(*names: str) -> list[TableColumn]:
    return [TableColumn(name, number=True) for name in names]


def _wide(*names: str) -> list[TableColumn]:
    return [TableColumn(name, number=True, wide=True) for name in names]


DEVICE_COLUMNS = [
    *_texts("device", "tier", "state"),
    *_wide("round"),
    *_texts("stage"),
    *_numbers("loss"),
    *_wide("step (ms)", "until report (s)", "memory", "down", "up", "reports", "missed"),
]
ROUND_COLUMNS = [
    *_numbers("round"),
    *_texts("state"),
    *_wide("selected"),
    *_numbers("arrived"),
    *_wide("late", "declined"),
    TableColumn("reasons without an update", wide=True),
    *_numbers("score", "loss"),
    *_wide("duration (s)", "down", "up"),
]
TIER_COLUMNS = [
    *_texts("tier"),
    *_numbers("devices"),
    *_wide("online"),
    TableColumn("on held-out rows", number=True, optional=True),
    *_numbers("memory planned", "measured (median)"),
    *_wide("measured (highest)"),
    *_texts("highest / planned"),
    *_wide("step (ms)", "until report (s)", "down", "up"),
]
_PART_FIGURES = [
    *_texts("result"),
    *_numbers("until report (s)", "step (ms)", "loss"),
    *_wide("memory", "down", "up", "versions behind"),
]
PARTS_OF_DEVICE = [*_numbers("round"), *_PART_FIGURES]
PARTS_OF_ROUND = [*_texts("device"), *_PART_FIGURES]
_MOST_REASONS = 4


def head(run: RunRow) -> Html:
    """Return the contents of the headline: the run's name, its phase and its problems."""
    silent = run.silent_s is not None and run.silent_s > SILENT_S
    over = run.phase in ("starting", "done", "stopped", "refused")
    state = f"{run.phase}, paused" if run.paused else run.phase
    notes: list[Child] = [
        el("strong", state, class_=f"phase {run.phase}"),
        f" {run.text}" if run.text else "",
    ]
    if run.broker_offline and not over:
        notes.append(el("span", " the broker is away", class_="bad"))
    if silent and not over:
        notes.append(el("span", f" the server was last heard at {_clock_of(run)}", class_="bad"))
    if run.problem:
        notes.append(el("span", f" {run.problem}", class_="bad"))
    return join_children(el("h1", link("/", run.federation or "a run that begins")), el("p", *notes))


def tiles(run: RunRow) -> Html:
    """Return the main figures of the run, as pairs of ``dt`` and ``dd`` elements."""
    on_devices = _metric(run.metric, run.device_metric)
    figures = [
        ("round", f"{run.round} of {run.rounds}" if run.rounds else str(run.round)),
        ("devices online", f"{run.online} of {run.devices}"),
        ("working", str(run.working)),
        ("accuracy", "-" if run.accuracy is None else f"{run.accuracy:.1%}"),
        ("loss", _number(run.loss)),
        *([(f"{run.metric} on devices", on_devices)] if on_devices else []),
    ]
    return join_children(*(el("div", el("dt", name), el("dd", value)) for name, value in figures))


def device(found: DeviceRow) -> Html:
    """Return a device's row for the table of devices."""
    stage = found.stage
    if found.steps and stage not in ("reported", "failed"):
        stage = f"{stage} {found.step}/{found.steps}"
    cells = [
        link(device_path(found.device), found.device),
        found.tier,
        el("span", found.state, class_=f"state {found.state}"),
        str(found.round or ""),
        stage,
        *map(_number, (found.loss, found.step_ms or None, found.seconds)),
        *map(size_of, (found.used_bytes, found.down_bytes, found.up_bytes)),
        *map(str, (found.reports, found.missed)),
    ]
    return row(found.device, DEVICE_COLUMNS, cells)


def round_(found: RoundSummary) -> Html:
    """Return a round's row for the table of rounds."""
    score = found.metrics.get(found.metric) if found.metric != "loss" else None
    shown = f"{found.metric} {score:.4g}" if score is not None else ""
    if (evaluation := found.evaluation) is not None and evaluation.devices is not None:
        value = evaluation.devices.metrics.get(evaluation.metric)
        shown = "" if value is None else f"{evaluation.metric} {value:.4g}"
    reasons = sorted(found.reasons.items(), key=lambda item: (-item[1], item[0]))
    why = "; ".join(f"{count} {reason}" for reason, count in reasons[:_MOST_REASONS])
    more = len(reasons) - _MOST_REASONS
    cells = [
        link(f"/rounds/{found.round}", str(found.round)),
        found.state + (", measuring" if found.measures else ", evaluation" if found.evaluates else ""),
        *map(str, (found.selected, found.arrived, found.late, found.declined)),
        (why + (f" and {more} more" if more > 0 else "")) or found.text,
        shown,
        *map(_number, (found.loss, found.seconds)),
        *map(size_of, (found.down_bytes, found.up_bytes)),
    ]
    return row(str(found.round), ROUND_COLUMNS, cells, found.state)


def tier(found: TierRow) -> Html:
    """Return a tier's row for the table of tiers, with a bar of measured memory relative to the plan."""
    share = el("span", "")
    if found.planned_bytes and found.most_used_bytes:
        ratio = found.most_used_bytes / found.planned_bytes
        # Green up to the plan, amber up to a tenth above it, red beyond.
        levels: dict[str, float] = {"max": 1.5, "low": 1.0, "high": 1.1, "optimum": 0.5}
        share = join_children(
            el("meter", value=round(ratio, 3), aria_hidden="true", **levels), f" {ratio:.0%}"
        )
    cells = [
        link(f"/?{urlencode({'tier': found.tier})}#fleet", found.tier) if found.tier else "none",
        *map(str, (found.devices, found.online)),
        _metric(found.metric, found.device_metric),
        *map(size_of, (found.planned_bytes, found.used_bytes, found.most_used_bytes)),
        share,
        *map(_number, (found.step_ms, found.seconds)),
        *map(size_of, (found.down_bytes, found.up_bytes)),
    ]
    return row(found.tier or "none", TIER_COLUMNS, cells)


def evaluation(found: DeviceEvaluation | None) -> Html:
    """Return the results of an evaluation round by tier: a table, and a histogram of the devices for each group. It is
    empty without results.
    """
    if found is None:
        return Html("")
    name, groups = found.metric, groups_of(found)
    columns = [
        *_texts("tier"),
        *_numbers("devices"),
        *_wide("rows"),
        *_numbers(name, "median", "worst decile"),
        *([] if name == "loss" else _wide("loss")),
    ]
    rows = []
    for tier, group in groups.items():
        values = [_metric(name, each.get(name)) for each in (group.metrics, group.median, group.worst_decile)]
        loss = [] if name == "loss" else [_number(group.metrics.get("loss"))]
        cells = [tier or "all", str(group.devices), f"{group.rows:,.0f}", *values, *loss]
        rows.append(row(tier, columns, cells))
    charts = [_histogram(tier or "all", name, group) for tier, group in groups.items() if group.histogram]
    left_out = ", ".join(found.left_out)
    return join_children(
        el("h2", f"On held-out rows of the devices, after {found.trained_rounds} training rounds"),
        table("results", "results by tier", columns, rows),
        el("div", *charts, class_="histograms") if charts else None,
        el("p", f"Not shown, fewer devices than evaluate.least_group: {left_out}") if left_out else None,
    )


def _histogram(tier: str, metric: str, group: GroupResult) -> Html:
    """Return the number of a group's devices by metric as a figure, in equal bins from 0 to 1."""
    counts, most = group.histogram, max(*group.histogram, 1)
    left, bottom, width, height = 10.0, 84.0, 220.0, 64.0
    step = width / len(counts)
    shapes = []
    for at, count in enumerate(counts):
        x, top = left + at * step, bottom - height * count / most
        shapes.append(el("rect", x=x + 1, y=round(top, 1), width=step - 2, height=round(bottom - top, 1)))
        if count:
            shapes.append(el("text", str(count), x=x + step / 2, y=round(top - 3, 1)))
    shapes.append(el("line", x1=left, x2=left + width, y1=bottom, y2=bottom))
    for value in (0.0, 0.5, 1.0):
        shapes.append(el("text", f"{value:g}", x=left + value * width, y=bottom + 13))
    shapes.append(el("text", metric, x=left + width / 2, y=bottom + 26))
    bins = (
        f"{at / len(counts):.1f} to {(at + 1) / len(counts):.1f}: {count}" for at, count in enumerate(counts)
    )
    return el(
        "figure",
        el("figcaption", f"{tier}: {count_text(group.devices, 'device')} by {metric}"),
        el("svg", *shapes, viewBox="0 0 240 114", role="img", aria_label=", ".join(bins)),
        class_="chart",
    )


def part(found: DeviceRound, *, by_device: bool = False) -> Html:
    """Return the table row for one device in one round.

    Its first cell is the round, for the page of a device; if ``by_device``, it is the device, for the page of a round.
    """
    fate = f"{found.status}: {found.reason}" if found.reason else found.status
    figures = [
        fate,
        *map(_number, (found.seconds, found.step_ms or None, found.loss)),
        *map(size_of, (found.used_bytes, found.down_bytes, found.up_bytes)),
        str(found.staleness),
    ]
    if by_device:
        return row(found.device, PARTS_OF_ROUND, [link(device_path(found.device), found.device), *figures])
    number = str(found.round)
    return row(number, PARTS_OF_DEVICE, [link(f"/rounds/{number}", number), *figures])


def entry(found: LogEntry) -> Html:
    """Return a line of the log as an ``li`` element."""
    when = el("time", time.strftime("%H:%M:%S", time.localtime(found.at)), datetime=_iso(found.at))
    whose = join_children(link(device_path(found.device), found.device), " ") if found.device else Html("")
    return el("li", when, " ", el("b", found.kind), " ", whose, found.text, data_key=str(found.n))


def versions(fleet: Fleet) -> Html:
    """Return the rounds to which the model can be rolled back, as ``option`` elements, the newest first."""
    earlier = [number for number in fleet.checkpoints if number < fleet.next_round - 1]
    return join_children(*(el("option", str(number), value=number) for number in reversed(earlier)))


def pager(fleet: Fleet, matching: int, page: int, pages: int, query: str) -> Html:
    """Return the number of matching devices, and links to the previous and the next page.

    ``query`` is the URL query of the filter, without the page.
    """
    summary = f"{matching} of {len(fleet.devices)} devices, page {page} of {pages}"
    back = link(f"/?{query}&page={page - 1}#fleet", "previous", rel="prev") if page > 1 else ""
    on = link(f"/?{query}&page={page + 1}#fleet", "next", rel="next") if page < pages else ""
    return join_children(el("span", summary, role="status"), " ", back, " ", on)


def _clock_of(run: RunRow) -> str:
    return time.strftime("%H:%M", time.localtime(time.time() - (run.silent_s or 0.0)))


def _iso(at: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at))


def _metric(name: str, value: float | None) -> str:
    return "" if value is None else metric_value(name, value)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}" if abs(value) < 999.5 else f"{value:,.0f}"


def size_of(count: int) -> str:
    """Return a number of bytes with a unit, such as ``1.5 MiB``; an empty text for 0."""
    return size(count) if count else ""
