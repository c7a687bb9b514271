"""The parts of a page, each of which is sent anew where it changed."""

from __future__ import annotations

import time
from urllib.parse import urlencode

from edgefl.system.sizes import size
from server.dashboard.known.fleet import Entry, Fleet, Part
from server.dashboard.shown.html import Cell, Child, Html, device_path, el, joined, link, row
from server.dashboard.shown.rows import SILENT_S, DeviceRow, RoundRow, RunRow, TierRow

DEVICE_HEADS = [
    Cell("device"),
    Cell("tier"),
    Cell("state"),
    Cell("round", number=True),
    Cell("stage"),
    Cell("loss", number=True),
    Cell("ms a step", number=True, wide=True),
    Cell("s to report", number=True, wide=True),
    Cell("memory", number=True, wide=True),
    Cell("down", number=True, wide=True),
    Cell("up", number=True, wide=True),
    Cell("reports", number=True),
    Cell("missed", number=True, wide=True),
]
ROUND_HEADS = [
    Cell("round", number=True),
    Cell("state"),
    Cell("selected", number=True),
    Cell("arrived", number=True),
    Cell("late", number=True),
    Cell("declined", number=True),
    Cell("why not"),
    Cell("score", number=True),
    Cell("loss", number=True),
    Cell("s", number=True),
    Cell("down", number=True, wide=True),
    Cell("up", number=True, wide=True),
]
TIER_HEADS = [
    Cell("tier"),
    Cell("devices", number=True),
    Cell("online", number=True),
    Cell("planned", number=True),
    Cell("measured", number=True),
    Cell("most", number=True, wide=True),
    Cell("of plan"),
    Cell("ms a step", number=True),
    Cell("s to report", number=True),
    Cell("down", number=True, wide=True),
    Cell("up", number=True, wide=True),
]
PART_HEADS = [
    Cell("round", number=True),
    Cell("what became of it"),
    Cell("s to report", number=True),
    Cell("ms a step", number=True),
    Cell("loss", number=True),
    Cell("memory", number=True, wide=True),
    Cell("down", number=True, wide=True),
    Cell("up", number=True, wide=True),
    Cell("versions behind", number=True, wide=True),
]
_MOST_REASONS = 4


def head(run: RunRow) -> Html:
    """What the run is about and whether it lives."""
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
    return joined(el("h1", link("/", run.federation or "a run that begins")), el("p", *notes))


def tiles(run: RunRow) -> Html:
    """The figures that people look for first."""
    figures = [
        ("round", f"{run.round} of {run.rounds}" if run.rounds else str(run.round)),
        ("devices online", f"{run.online} of {run.devices}"),
        ("working", str(run.working)),
        ("accuracy", "-" if run.accuracy is None else f"{run.accuracy:.1%}"),
        ("loss", _number(run.loss)),
    ]
    return joined(*(el("div", el("dt", name), el("dd", value)) for name, value in figures))


def device(found: DeviceRow) -> Html:
    stage = found.stage
    if found.steps and stage not in ("reported", "failed"):
        stage = f"{stage} {found.step}/{found.steps}"
    cells = [
        Cell(link(device_path(found.device), found.device)),
        Cell(found.tier),
        Cell(el("span", found.state, class_=f"state {found.state}")),
        Cell(str(found.round or ""), number=True),
        Cell(stage),
        Cell(_number(found.loss), number=True),
        Cell(_number(found.step_ms or None), number=True, wide=True),
        Cell(_number(found.seconds), number=True, wide=True),
        Cell(size_of(found.used_bytes), number=True, wide=True),
        Cell(size_of(found.down_bytes), number=True, wide=True),
        Cell(size_of(found.up_bytes), number=True, wide=True),
        Cell(str(found.reports), number=True),
        Cell(str(found.missed), number=True, wide=True),
    ]
    return row(found.device, cells)


def round_(found: RoundRow) -> Html:
    score = found.metrics.get(found.metric) if found.metric != "loss" else None
    reasons = sorted(found.reasons.items(), key=lambda item: (-item[1], item[0]))
    why = "; ".join(f"{count} {reason}" for reason, count in reasons[:_MOST_REASONS])
    more = len(reasons) - _MOST_REASONS
    cells = [
        Cell(link(f"/rounds/{found.round}", str(found.round)), number=True),
        Cell(found.state),
        Cell(str(found.selected), number=True),
        Cell(str(found.arrived), number=True),
        Cell(str(found.late), number=True),
        Cell(str(found.declined), number=True),
        Cell((why + (f" and {more} more" if more > 0 else "")) or found.text),
        Cell(f"{found.metric} {score:.4g}" if score is not None else "", number=True),
        Cell(_number(found.loss), number=True),
        Cell(_number(found.seconds), number=True),
        Cell(size_of(found.down_bytes), number=True, wide=True),
        Cell(size_of(found.up_bytes), number=True, wide=True),
    ]
    return row(str(found.round), cells, found.state)


def tier(found: TierRow) -> Html:
    share = el("span", "")
    if found.planned_bytes and found.used_bytes:
        ratio = found.used_bytes / found.planned_bytes
        share = joined(
            el("meter", value=round(ratio, 3), max=1.5, high=1.0, min=0, optimum=0.5, aria_hidden="true"),
            f" {ratio:.0%}",
        )
    cells = [
        Cell(link(f"/?{urlencode({'tier': found.tier})}#fleet", found.tier) if found.tier else "none"),
        Cell(str(found.devices), number=True),
        Cell(str(found.online), number=True),
        Cell(size_of(found.planned_bytes), number=True),
        Cell(size_of(found.used_bytes), number=True),
        Cell(size_of(found.most_used_bytes), number=True, wide=True),
        Cell(share),
        Cell(_number(found.step_ms), number=True),
        Cell(_number(found.seconds), number=True),
        Cell(size_of(found.down_bytes), number=True, wide=True),
        Cell(size_of(found.up_bytes), number=True, wide=True),
    ]
    return row(found.tier or "none", cells)


def part(found: Part, *, by_device: bool = False) -> Html:
    """A device in a round: for the page of the device, or, ``by_device``, for that of the round."""
    fate = f"{found.status}: {found.reason}" if found.reason else found.status
    first = link(device_path(found.device), found.device) if by_device else None
    cells = [
        Cell(first or link(f"/rounds/{found.round}", str(found.round)), number=not by_device),
        Cell(fate),
        Cell(_number(found.seconds), number=True),
        Cell(_number(found.step_ms or None), number=True),
        Cell(_number(found.loss), number=True),
        Cell(size_of(found.used_bytes), number=True, wide=True),
        Cell(size_of(found.down_bytes), number=True, wide=True),
        Cell(size_of(found.up_bytes), number=True, wide=True),
        Cell(str(found.staleness), number=True, wide=True),
    ]
    return row(found.device if by_device else str(found.round), cells)


def entry(found: Entry) -> Html:
    """A line of the log."""
    when = el("time", time.strftime("%H:%M:%S", time.localtime(found.at)), datetime=_iso(found.at))
    whose = joined(link(device_path(found.device), found.device), " ") if found.device else Html("")
    return el("li", when, " ", el("b", found.kind), " ", whose, found.text, data_key=str(found.n))


def versions(fleet: Fleet) -> Html:
    """The rounds to which the model can be taken back, as options."""
    earlier = [number for number in fleet.checkpoints if number < fleet.next_round - 1]
    return joined(*(el("option", str(number), value=number) for number in reversed(earlier)))


def pager(fleet: Fleet, matching: int, page: int, pages: int, query: str) -> Html:
    """How many devices match, and the way to the pages before and behind."""
    told = f"{matching} of {len(fleet.devices)} devices, page {page} of {pages}"
    back = link(f"/?{query}&page={page - 1}#fleet", "previous", rel="prev") if page > 1 else ""
    on = link(f"/?{query}&page={page + 1}#fleet", "next", rel="next") if page < pages else ""
    return joined(el("span", told, role="status"), " ", back, " ", on)


def _clock_of(run: RunRow) -> str:
    return time.strftime("%H:%M", time.localtime(time.time() - (run.silent_s or 0.0)))


def _iso(at: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at))


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}" if abs(value) < 999.5 else f"{value:,.0f}"


def size_of(count: int) -> str:
    """As people write it; empty for nothing."""
    return size(count) if count else ""
