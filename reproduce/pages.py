"""Pages of results: one for each table or figure of a paper, shown as in the paper, and the overview of all verdicts.

For readers of the papers whose methods edgefl implements: every table and figure, and the verdicts on its claims. Each page
shows the table as in the paper and names its command. A claim is a statement of the paper or a reading of its table. It is
reproduced or contradicted where a paired t-test over the seeds says so at 95 % after Holm's correction over its page, else
inconclusive; theorems and accounted numbers are exact checks. T: table, F: figure; a row has those that share runs. Hours:
of one processor core.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from edgefl.analysis.charts import line_chart
from edgefl.system.files import write_text
from reproduce.entry import SCALES, Cell, Chart, Choice, Entry, Grid, NotRunError, Results, Scale, note_of
from reproduce.runs import Record, read_records, results_of
from reproduce.verdicts import ANSWERS, LEVEL, Verdict, prediction, verdicts

Row = dict[str, Any]
"""A row of a table: cells by heading."""
_Judged = tuple[Sequence[Record], Sequence[Verdict]]
_FEW_ARMS = 3
"""Most arms that a page's command names; with more it runs all."""
OVERVIEW = "README.md"
COMPARED = ("arm", "figure", "published", "value", "seeds", "expected", "inside")
"""Cells of a row that compares new runs with published ones."""
FAILS = "**fails**"
"""State of an exact check that does not hold."""
PAPERS = {
    "embracingfl": "EmbracingFL",
    "fedbat": "FedBAT",
    "per_fedavg": "Per-FedAvg",
    "fiarse": "FIARSE",
    "fafed": "FAFED",
}


class EntryResults:
    """Records of an entry at one scale, and the verdicts on its claims.

    Args:
        entry: the entry.
        out: folder of its records.
        scale: scale to read; None: the one at which most claims are decided, and the largest of these.
    """

    def __init__(self, entry: Entry, out: Path, scale: Scale | None = None) -> None:
        records = read_records(entry, out)
        judged: dict[Scale, _Judged] = {}
        for each in SCALES if scale is None else [scale]:
            if own := [record for record in records if record.scale == each]:
                judged[each] = own, verdicts(entry, results_of(own), _fewest_seeds(entry, each, own))
        decided = {each: sum(v.p == v.p for v in found) for each, (_, found) in judged.items()}
        self.entry = entry
        order: list[Scale] = sorted(judged, key=lambda each: (decided[each], SCALES.index(each)))
        self.scale = order[-1] if order else None
        nothing: _Judged = [], verdicts(entry, Results({}), 2)
        self.records, self.verdicts = judged[order[-1]] if order else nothing
        self.results = results_of(self.records)
        self.others = Counter(record.scale for record in records if record.scale != self.scale)

    @property
    def seeds(self) -> list[int]:
        """Seeds of all runs, sorted."""
        return sorted({record.seed for record in self.records})

    @property
    def hours(self) -> str:
        """Processor hours of all runs, as text."""
        hours = sum(record.cpu_seconds for record in self.records) / 3600
        return f"{hours:.1f}" if hours >= 0.05 else "<0.1"

    @property
    def command(self) -> str:
        """Command that repeats the runs."""
        words = ["python", "-m", "reproduce", self.entry.name, "--scale", self.scale or "paper"]
        arms = list(dict.fromkeys(record.arm for record in self.records))
        if self.scale and len(arms) < len(self.entry.arms(self.scale)) and len(arms) <= _FEW_ARMS:
            words += [word for arm in arms for word in ("--arm", f'"{arm}"')]
        if any(record.device == "cuda" for record in self.records):
            words += ["--device", "cuda"]
        return " ".join([*words, *(["--seeds", ",".join(map(str, self.seeds))] if self.seeds else [])])

    def checks(self) -> list[Row]:
        """Return check, finding, and ``holds``, ``fails`` or ``not run`` of each exact check."""
        rows = []
        for check in self.entry.checks:
            try:
                holds, finding = check.test(self.results)
                state = "holds" if holds else FAILS
            except NotRunError:
                finding, state = "-", "not run"
            rows.append({"exact check": check.text, "found": finding, "state": state})
        return rows

    def claims(self) -> list[Row]:
        """Return text, the paper's numbers, ours, p and verdict of each claim."""
        rows = ((v.claim.text, v.claim.paper or "-", v.ours, v.p_text, v.answer) for v in self.verdicts)
        return [dict(zip(("claim", "paper", "ours", "p", "verdict"), row, strict=True)) for row in rows]

    def plain(self) -> dict[str, object]:
        """Return verdicts and checks as an object for JSON."""
        checks = [{"check": row.pop("exact check"), **row} for row in self.checks()]
        of = {"entry": self.entry.name, "scale": self.scale or "", "seeds": self.seeds}
        return {**of, "claims": self.claims(), "checks": checks}

    @property
    def answers(self) -> Counter[str]:
        """Number of claims by answer."""
        return Counter(each.answer for each in self.verdicts)

    @property
    def checks_that_hold(self) -> str:
        """Number of checks that hold, of those that were run: "2 of 3"; "" without any."""
        states = [row["state"] for row in self.checks() if row["state"] != "not run"]
        return f"{states.count('holds')} of {len(states)}" if states else ""

    @property
    def summary(self) -> str:
        """Number of claims by answer, and of the checks that hold."""
        texts = [f"{count} {answer}" for answer in ANSWERS if (count := self.answers[answer])]
        texts += [f"{self.checks_that_hold} checks hold"] if self.checks_that_hold else []
        return ", ".join(texts) or ("run" if self.records else "not run")


def write_page(entry: Entry, out: Path) -> EntryResults:
    """Write the page and pictures of an entry beside its records, and return what they show."""
    found = EntryResults(entry, out)
    place = out / entry.name
    place.parent.mkdir(parents=True, exist_ok=True)
    pictures = [name for chart in entry.charts if (name := _picture(chart, found, place))]
    write_text(place.with_suffix(".md"), page(found, pictures))
    return found


def page(found: EntryResults, pictures: Sequence[str] = ()) -> str:
    """Return the page of an entry as Markdown."""
    entry, records = found.entry, found.records
    paper, _, _ = entry.name.partition("/")
    parts = [f"# {PAPERS.get(paper, paper)}: {entry.title}"]
    if records:
        made = {f"version {r.version}, {r.device}: {r.processor}" for r in records} | {
            r.data for r in records
        }
        parts += [
            f"Scale `{found.scale}`, seeds {', '.join(map(str, found.seeds))}: **{found.summary}**; "
            f"{found.hours} processor hours; `{found.command}`",
            f"Runs: {len(records)}; {'; '.join(sorted(made - {''}))}.",
        ]
        if found.scale == "smoke":
            parts.append("This is a test of the program: numbers of scale `smoke` mean nothing.")
        if found.others:
            others = ", ".join(f"{runs} runs at scale `{scale}`" for scale, runs in found.others.items())
            parts.append(f"Also run: {others}.")
        if entry.needs:
            parts.append(f"Not run here: {entry.needs}")
    else:
        parts.append(f"**Not run.** {entry.needs or f'`{found.command}`'}")
    parts.append(entry.note)
    if entry.other_data:
        parts.append(f"The data are {entry.other_data}, not the paper's: only differences are judged.")
    if entry.grids and records:
        parts.append(
            "Cells: our mean ± the deviation of one run over the seeds, in brackets the paper's number."
        )
    for each in entry.grids:
        parts += [f"**{each.title}**" if each.title else "", table(each, found.results)]
    parts.append(_table([row for each in entry.choices for row in _tried(each, found.results)]))
    if entry.claims:
        about = "differences, each with its own 95 % interval; p of the paired t-test after Holm's correction"
        if any(len(claim.parts) > 2 for claim in entry.claims):
            about += "; of many differences the one that decides, with its name"
        parts += [f"Claims: {about} (level {LEVEL}).", _table(found.claims())]
    parts += [_table(found.checks()), "\n".join(f"![{name}]({name})" for name in pictures)]
    return "\n\n".join(filter(None, parts)) + "\n"


def table(grid: Grid, results: Results) -> str:
    """Return a table as in the paper, as Markdown."""
    printed = [f"{cell.paper:.10g}" for cell in grid.cells if cell.paper is not None]
    digits = max((len(number.partition(".")[2]) for number in printed), default=0)
    heads = [grid.corner, *grid.columns]
    rows = ([row, *(_shown(cell, results, digits) for cell in cells)] for row, cells in grid.rows.items())
    return _table([dict(zip(heads, row, strict=True)) for row in rows])


def _table(rows: Sequence[Row]) -> str:
    """Return rows of text by heading as a table, "" without rows."""
    if not rows:
        return ""
    texts = [list(rows[0]), *(map(str, row.values()) for row in rows)]
    heads, *lines = ("| " + " | ".join(cell.replace("|", "&#124;") for cell in row) + " |" for row in texts)
    return "\n".join([heads, "|---" * len(rows[0]) + "|", *lines])


def _shown(cell: Cell | None, results: Results, digits: int) -> str:
    if cell is None:
        return ""
    paper = "" if cell.paper is None else f" ({cell.paper:,.{digits}f})"
    try:
        values = cell.unit * (cell.value(results) if cell.value else results.of(cell.arm, cell.figure))
    except NotRunError:
        return ("diverged" if results.diverged(cell.arm) else "-") + paper
    spread = f" ± {values.std(ddof=1):.{cell.digits}f}" if len(values) > 1 else ""
    if len(values) < max(map(len, results.runs.values())):
        spread += f", n={len(values)}"
    return f"{values.mean():,.{cell.digits}f}{spread}{paper}"


def _tried(choice: Choice, results: Results) -> list[Row]:
    """Return setting, value, its mean, and "chosen" or "" of each candidate."""
    complete = all(arm in results.runs for arm in choice.candidates.values())
    chosen = choice.of(results) if complete else ""
    rows = []
    for value, arm in choice.candidates.items():
        mean = "diverged" if results.diverged(arm) else "-"
        if mean == "-" and arm in results.runs:
            mean = f"{results.of(arm, choice.figure).mean():.3f}"
        state = "chosen" if value == chosen else ""
        rows.append({"setting": choice.name, "value": value, "on validation data": mean, "choice": state})
    return rows


def _picture(chart: Chart, found: EntryResults, place: Path) -> str:
    """Write a chart, and return its file name, or "" where no run has the curve."""
    results = found.results
    if chart.lines:
        drawn = {name: results.line(chart.arms[0], name) for name in chart.lines}
    else:
        drawn = {arm: results.line(arm, chart.line) for arm in chart.arms or results.runs}
    drawn = {name: line for name, line in drawn.items() if line}
    if not drawn:
        return ""
    name = f"{place.name}-{chart.file}"
    picture = line_chart(drawn, title=chart.title, x=chart.x, y=chart.y or chart.line, log_y=chart.log_y)
    write_text(place.with_name(name), picture)
    return name


def overview(entries: Sequence[Entry], out: Path) -> str:
    """Return the overview as Markdown: each table of the five papers, and its verdicts."""
    rows: list[Row] = []
    for runs in dict.fromkeys(entry.runs for entry in entries):
        found = [EntryResults(entry, out) for entry in entries if entry.runs == runs]
        counts = sum((each.answers for each in found), Counter[str]())
        whole = max(found, key=lambda each: len(each.records))  # the first one may show some arms only
        seeds = sorted(set(Counter(record.arm for record in whole.records).values())) or [0]
        rows.append(
            {
                "paper": PAPERS[runs.partition("/")[0]],
                "table": ", ".join(_link(each.entry.name, out) for each in found),
                "scale": whole.scale or "-",
                "seeds per arm": "-".join(dict.fromkeys((str(seeds[0]), str(seeds[-1])))),
                **{answer: counts[answer] or "" for answer in ANSWERS},
                "checks hold": whole.checks_that_hold,
                "hours": whole.hours if whole.records else "-",
            }
        )
    return f"# The papers' results, run again\n\n{note_of(__doc__)}\n\n{_table(rows)}\n"


def _link(name: str, out: Path) -> str:
    return f"[{_label(name)}]({name}.md)" if (out / f"{name}.md").exists() else _label(name)


def _label(name: str) -> str:
    """Return T1 for paper/table1, F2a-4a for paper/figures2a-4a, and other names as they are."""
    _, _, short = name.partition("/")
    short = re.sub(r"^(t|f)(?:able|igure)s?(?=\d)", lambda found: found[1].upper(), short)
    return short.replace("and", " and ")


class Comparison:
    """New runs of an entry beside the published ones of the same arms, scale and data.

    Args:
        entry: the entry of all runs.
        records: the new runs, of one scale.
        published: folder of the published records.

    ``old``: the published results; ``fewest``: number of new seeds that a verdict needs.
    """

    def __init__(self, entry: Entry, records: Sequence[Record], published: Path) -> None:
        self.entry, scale = entry, records[0].scale if records else None
        self.old = EntryResults(entry, published, scale)
        data = {(each.arm, each.data) for each in self.old.records}
        known = {(each.arm, each.seed): each for each in self.old.records}
        both = [each for each in records if each.arm in self.old.results.runs]
        self._on_other_data = [each for each in both if (each.arm, each.data) not in data]
        alike = [each for each in both if each not in self._on_other_data]
        self._pairs = [(each, known[key]) for each in alike if (key := (each.arm, each.seed)) in known]
        again = [mine for mine, _ in self._pairs if len(self.old.results.runs[mine.arm]) > 1]
        self._new = results_of([each for each in alike if each not in again])
        self.fewest = _fewest_seeds(entry, scale or "smoke", records)

    def cells(self) -> list[Row]:
        """Return a row (:data:`COMPARED`) for each cell that both have, of new seeds. ``published``: mean and deviation;
        ``expected``: prediction interval of the value; all of them together hold at 95 %.
        """
        both, new, old = [], self._new, self.old.results
        for cell in dict.fromkeys(cell for grid in self.entry.grids for cell in grid.cells):
            try:
                both.append((cell, new.of(cell.arm, cell.figure), old.of(cell.arm, cell.figure)))
            except NotRunError:
                continue
        rows: list[Row] = []
        for cell, mine, theirs in both:
            value, digits = cell.unit * float(mine.mean()), cell.digits
            low, high = (cell.unit * end for end in prediction(theirs, len(mine), len(both)))
            shown = _shown(replace(cell, paper=None, value=None), old, 0)
            expected, inside = f"{low:.{digits}f} to {high:.{digits}f}", low <= value <= high
            row = (cell.arm, cell.figure, shown, round(value, digits + 1), len(mine), expected, inside)
            rows.append(dict(zip(COMPARED, row, strict=True)))
        return rows

    def claims(self) -> list[Row]:
        """Return each claim whose arms have new seeds in common: the published verdict, theirs alone, the difference."""
        own = verdicts(self.entry, self._new, self.fewest)
        pairs = zip(self.old.verdicts, own, strict=True)
        rows = ((old.claim.text, old.answer, new.answer, new.ours) for old, new in pairs)
        kept = (row for row in rows if "not run" not in row[1:3])
        return [dict(zip(("claim", "published", "yours", "difference"), row, strict=True)) for row in kept]

    def remarks(self) -> list[str]:
        """Return sentences: how many runs of published seeds have equal figures, and how many are not compared."""
        texts = []
        if self._pairs:
            unequal = [pair for pair in self._pairs if pair[0].figures != pair[1].figures]
            count = len(self._pairs) - len(unequal)
            texts.append(
                f"{count} of {len(self._pairs)} runs with published seeds have the published figures"
            )
            if moved := [pair for pair in unequal if pair[0].processor != pair[1].processor]:
                mine, theirs = (_joined(each.processor for each in side) for side in zip(*moved, strict=True))
                texts.append(
                    f"{len(moved)} of the others ran on another processor: published {theirs}, here {mine}"
                )
        if other := self._on_other_data:
            arms = {each.arm for each in other}
            data = _joined(each.data for each in self.old.records if each.arm in arms)
            mine = _joined(each.data for each in other)
            texts.append(
                f"not compared, because of other data: {len(other)} of the runs; published {data}, here {mine}"
            )
        return texts


def _joined(texts: Iterable[str]) -> str:
    return ", ".join(sorted(set(texts)))


def _fewest_seeds(entry: Entry, scale: Scale, records: Sequence[Record]) -> int:
    """Return the number of seeds that a verdict needs. Numbers of scale smoke mean nothing: they decide no claim."""
    return entry.seeds[scale] if scale != "smoke" else len(records) + 1
