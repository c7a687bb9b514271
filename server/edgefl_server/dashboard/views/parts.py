"""Parts of a page, each of which is sent again when it changes."""

from __future__ import annotations

import time
from urllib.parse import urlencode

from edgefl.system.sizes import size
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
)
from edgefl_server.dashboard.views.summary import SILENT_S, DeviceRow, RoundSummary, RunRow, TierRow


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
    figures = [
        ("round", f"{run.round} of {run.rounds}" if run.rounds else str(run.round)),
        ("devices online", f"{run.online} of {run.devices}"),
        ("working", str(run.working)),
        ("accuracy", "-" if run.accuracy is None else f"{run.accuracy:.1%}"),
        ("loss", _number(run.loss)),
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
    reasons = sorted(found.reasons.items(), key=lambda item: (-item[1], item[0]))
    why = "; ".join(f"{count} {reason}" for reason, count in reasons[:_MOST_REASONS])
    more = len(reasons) - _MOST_REASONS
    cells = [
        link(f"/rounds/{found.round}", str(found.round)),
        found.state,
        *map(str, (found.selected, found.arrived, found.late, found.declined)),
        (why + (f" and {more} more" if more > 0 else "")) or found.text,
        f"{found.metric} {score:.4g}" if score is not None else "",
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
        *map(size_of, (found.planned_bytes, found.used_bytes, found.most_used_bytes)),
        share,
        *map(_number, (found.step_ms, found.seconds)),
        *map(size_of, (found.down_bytes, found.up_bytes)),
    ]
    return row(found.tier or "none", TIER_COLUMNS, cells)


def part(found: DeviceRound, *, by_device: bool = False) -> Html:
    """Return the table row for one device in one round.

    It begins with the round, for the device's page, or with ``by_device`` with the device, for the round's page.
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


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}" if abs(value) < 999.5 else f"{value:,.0f}"


def size_of(count: int) -> str:
    """Return a number of bytes with a unit, such as ``1.5 MiB``; an empty text for 0."""
    return size(count) if count else ""
