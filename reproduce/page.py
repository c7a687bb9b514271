"""The results as people read them: a page for each entry, and one over all of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from edgefl.analysis.charts import line_chart
from edgefl.system.files import write_text, write_whole
from reproduce.entry import Chart, Column, Entry
from reproduce.record import ArmSummary, ClaimSummary, Record, Summary, results_of
from reproduce.results import Results
from reproduce.withdrawn import ERRORS, withdrawn

PAGE_NAME, RESULTS_NAME = "README.md", "results.json"


def write_entry(entry: Entry, summary: Summary, records: Sequence[Record], out: Path) -> list[Path]:
    """Results, page and pictures of ``entry`` below ``out``; gives the files."""
    folder = out / entry.name
    folder.mkdir(parents=True, exist_ok=True)
    drawn = pictures(entry, results_of(records), records)
    for name, text in drawn.items():
        write_text(folder / name, text)
    write_whole(folder / RESULTS_NAME, msgspec.json.format(msgspec.json.encode(summary), indent=1) + b"\n")
    write_text(folder / PAGE_NAME, page(entry, summary, list(drawn)))
    return [folder / name for name in (PAGE_NAME, RESULTS_NAME, *drawn)]


def pictures(entry: Entry, results: Results, records: Sequence[Record]) -> Mapping[str, str]:
    """SVG text by file name."""
    drawn: dict[str, str] = {}
    for record in records:
        if record.seed == results.seeds[0]:
            drawn |= record.found.pictures
    for chart in entry.charts:
        lines = _lines(chart, results)
        if lines:
            drawn[chart.file] = line_chart(
                lines, title=chart.title, x=chart.x, y=chart.y or chart.line, log_y=chart.log_y
            )
    return drawn | dict(entry.drawn(results) if entry.drawn is not None else {})


def _lines(chart: Chart, results: Results) -> dict[str, list[tuple[float, float]]]:
    found = {
        arm: results.line(arm, chart.line) for arm in chart.arms or results.lines if arm in results.lines
    }
    return {arm: line for arm, line in found.items() if line}


def page(entry: Entry, summary: Summary, drawn: Sequence[str]) -> str:
    """Markdown."""
    made = summary.machine
    packages = made.get("packages", {})
    lines = [
        f"# {summary.entry}",
        "",
        f"{summary.what}.",
        "",
        f"`{summary.command}`: {_counted(len(summary.seeds), 'seed')}, {len(summary.arms)} arms, "
        f"{_span(summary.seconds)} of computing on {made.get('processor', '')} from {summary.started}; "
        + ", ".join(f"{name} {packages[name]}" for name in ("edgefl-tiers", "torch") if name in packages)
        + (f"; data: {', '.join(summary.data)}" if summary.data else "")
        + ".",
        "",
    ]
    if summary.scale == "smoke":
        lines += ["At scale `smoke` every run ends after a few rounds: the numbers mean nothing.", ""]
    if entry.note:
        lines += [entry.note, ""]
    names = dict.fromkeys(range(len(summary.claims)), summary.entry)
    lines += [*table(entry.columns, summary), "", *claims_table(summary.claims, names), ""]
    lines += [f"![{name.removesuffix('.svg')}]({name})" for name in drawn]
    return "\n".join(lines).rstrip() + "\n"


def table(columns: Sequence[Column], summary: Summary) -> list[str]:
    """A line for each arm: mean and deviation of each figure, the paper's number beside it where there is one. Without
    columns: a line for each figure of every arm."""
    if not columns:
        return _figures(summary)
    shown = [each for each in columns if any(each.figure in arm.mean for arm in summary.arms)]
    if not shown:
        return []
    published = [any(each.figure in arm.paper for arm in summary.arms) for each in shown]
    heads = [
        head
        for each, paper in zip(shown, published, strict=True)
        for head in (each.title, *(["paper"] if paper else []))
    ]
    rows = [_row(shown, published, arm) for arm in summary.arms]
    return [f"| arm | {' | '.join(heads)} |", "|---" * (1 + len(heads)) + "|", *rows]


def _figures(summary: Summary) -> list[str]:
    rows = [
        f"| {name} | {_plain(value)} | {_plain(arm.paper[name]) if name in arm.paper else '-'} |"
        for arm in summary.arms
        for name, value in arm.mean.items()
    ]
    return ["| figure | ours | paper |", "|---|---|---|", *rows]


def _plain(value: float) -> str:
    return f"{value:,.6g}"


def _row(columns: Sequence[Column], published: Sequence[bool], arm: ArmSummary) -> str:
    cells = [arm.arm]
    for column, paper in zip(columns, published, strict=True):
        cells.append(_value(column, arm.mean.get(column.figure), arm.deviation.get(column.figure, 0.0)))
        if paper:
            cells.append(_value(column, arm.paper.get(column.figure)))
    return f"| {' | '.join(cells)} |"


def _value(column: Column, value: float | None, deviation: float = 0.0) -> str:
    if value is None:
        return "-"
    text = f"{column.scale * value:,.{column.digits}f}"
    return text + (f" ± {column.scale * deviation:.{column.digits}f}" if deviation else "")


def claims_table(
    claims: Iterable[ClaimSummary], entries: Mapping[int, str], *, linked: bool = False
) -> list[str]:
    """Claim, paper, ours, held. ``entries``: by position what they come from; ``linked`` adds a column with it."""
    listed = list(claims)
    if not listed:
        return []
    first = "| entry | claim |" if linked else "| claim |"
    columns = first + " paper | ours | held | confidence |"
    rows = [columns, "|---" * (columns.count("|") - 1) + "|"]
    for at, each in enumerate(listed):
        entry, claim = entries[at], f"{each.rank}: {each.text}"
        start = f"| [{entry}]({entry}/{PAGE_NAME}) " if linked else ""
        held = "yes" if each.held else "**no**" + (f": {each.doubt}" if each.doubt else "")
        if error := withdrawn(entry, claim):
            held = f"**withdrawn** ({error})"
        cells = (claim, each.paper or "-", each.ours, held, each.confidence or "-")
        rows.append(f"{start}| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |")
    return rows


def summaries(out: Path) -> list[Summary]:
    """Of all entries that have results below ``out``, in the order of their names."""
    found = [
        msgspec.json.decode(path.read_bytes(), type=Summary)
        for path in sorted(out.glob(f"*/*/{RESULTS_NAME}"))
    ]
    return sorted(found, key=lambda each: each.entry)


def overview(found: Sequence[Summary]) -> str:
    """Markdown over all entries: every claim, and the command that made its numbers."""
    claims = [(summary, claim) for summary in found for claim in summary.claims]
    names = {at: summary.entry for at, (summary, _) in enumerate(claims)}
    stand = [
        claim for summary, claim in claims if not withdrawn(summary.entry, f"{claim.rank}: {claim.text}")
    ]
    held = sum(claim.held for claim in stand)
    lines = [
        "# The papers' results, run again",
        "",
        "For readers of the papers whose methods edgefl implements. The page lists every claim that was tested, with the "
        f"paper's number and ours, and the command of each experiment. {held} of {len(stand)} claims held.",
        "",
        *_known_errors(len(claims) - len(stand), len(claims)),
        "A claim is the paper's, or the specification's expectation at a small scale, with the confidence that the "
        "specification stated before any run. Differences are in points: the mean of paired seeds, and in brackets the "
        "smallest and the largest. Claims that did not hold are listed unchanged.",
        "",
        *claims_table([claim for _, claim in claims], names, linked=True),
        "",
        "| entry | command | seeds | data | computing time |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| [{each.entry}]({each.entry}/{PAGE_NAME}) | `{each.command}` | {len(each.seeds)} | {', '.join(each.data) or '-'} "
        f"| {_span(each.seconds)} |"
        for each in found
    ]
    return "\n".join(lines) + "\n"


def _known_errors(withdrawn_claims: int, claims: int) -> list[str]:
    if not withdrawn_claims:
        return []
    return [
        f"**Known errors.** {withdrawn_claims} of {claims} claims are withdrawn until their experiments are run again. "
        "Their rows were computed with one of these errors:",
        "",
        *(f"* *{name}*: {text}." for name, text in ERRORS.items()),
        "",
        "Pilots of EmbracingFL, and probably of FIARSE and FedBAT, chose settings by test accuracy. `python -m reproduce` "
        "cannot run other seeds than those of the results.",
        "",
    ]


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _span(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
