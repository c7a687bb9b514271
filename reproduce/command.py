"""``python -m reproduce``: tables and figures of the papers, run again."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from edgefl.cli.options import writable_folder
from edgefl.cli.output import console, errors, print_json, print_table
from edgefl.errors import ConfigError
from edgefl.system.files import write_text

if TYPE_CHECKING:
    from reproduce.runs import Listener, Record, Task

PUBLISHED = Path(__file__).resolve().parents[1] / "docs" / "results"


def reproduce(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME]...", help="like fafed/table2, a paper, or all; `data` before them: fetch data"
        ),
    ] = None,
    scale: Annotated[Literal["smoke", "cpu", "paper"], typer.Option(help="size of the runs")] = "smoke",
    seeds: Annotated[str, typer.Option(help="seeds, like 3,4,5; default: those of the entry")] = "",
    arm: Annotated[
        list[str] | None,
        typer.Option(
            help="this arm alone; a text that is no arm's name: all arms whose name contains it; repeatable"
        ),
    ] = None,
    out: Annotated[
        Path, typer.Option(callback=writable_folder, help="folder for records, pages and pictures")
    ] = Path("reproductions"),
    jobs: Annotated[int, typer.Option(min=0, help="runs at a time; 0: one for each processor")] = 0,
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="where federations train")] = "cpu",
    minutes: Annotated[
        float, typer.Option(min=0, help="stop after this time, and resume next time; 0: never")
    ] = 0,
    pages: Annotated[bool, typer.Option("--pages", help="run nothing, write pages of the records")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON array, an object for each entry")] = False,
) -> None:
    """Run tables and figures of the papers again, and compare them with the paper's numbers and with published runs.

    Scales: `smoke` runs everything for a few rounds, as a test; `cpu` is a reduced experiment on two cores; `paper` is the
    paper's own size. Finished runs are kept, and the same command resumes stopped ones. Without a name, list the entries.

    The exit code is 1 if an exact check (an accounted number, a theorem) fails.

    Examples:

      python -m reproduce fafed/theorem1 --scale cpu

      python -m reproduce fiarse/table1 --scale cpu --arm HeteroFL --seeds 7,8

      python -m reproduce per_fedavg/table1 --scale paper --minutes 100
    """
    from reproduce.catalog import ENTRIES, selected
    from reproduce.pages import FAILS, OVERVIEW, Comparison, EntryResults, overview, write_page
    from reproduce.runs import fetch_data, run_entries

    if not names:
        rows: list[dict[str, object]] = [{"name": e.name, "title": e.title} for e in ENTRIES.values()]
        print_json(rows) if as_json else print_table("reproductions", rows)
        return
    if names[0] == "data":
        chosen = selected(names[1:] or ["all"])
        found_data = fetch_data(each for entry in chosen for each in entry.arms(scale))
        print_json(found_data) if as_json else console.print("\n".join(found_data))
        return
    chosen = selected(names)
    numbers, ended = _numbers(seeds), True
    if not pages:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            with _progress() as report:
                ended = run_entries(
                    chosen, out, scale=scale, seeds=numbers, arms=arm or (), jobs=jobs, device=device,
                    minutes=minutes, report=report,
                )  # fmt: skip
        except KeyboardInterrupt:
            errors.print("stopped; the same command resumes the runs")
            raise typer.Exit(130) from None
    if not ended:
        errors.print(f"stopped after {minutes:g} minutes; the same command resumes the runs")
    found = [write_page(entry, out) for entry in chosen]
    write_text(out / OVERVIEW, overview(list(ENTRIES.values()), out))
    answers = []
    for each in found:
        new = each.records if pages else EntryResults(each.entry, out, scale).records
        beside = Comparison(each.entry, [] if out.resolve() == PUBLISHED else new, PUBLISHED)
        cells, claims, remarks = beside.cells(), beside.claims(), beside.remarks()
        answers.append({**each.plain(), "compared": cells, "compared_claims": claims, "remarks": remarks})
        if not as_json:
            kind = "claims: " if each.entry.claims else ""
            console.print(f"{each.entry.name}: {kind}{each.summary}; {out / each.entry.name}.md")
            at = f"scale {beside.old.scale}"
            if cells:
                print_table(f"beside the published runs, {at}; together the intervals hold at 95 %", cells)
            if claims:
                print_table(f"claims by the new seeds alone, {at}; {beside.fewest} seeds decide", claims)
            for remark in remarks:
                console.print(remark)
    if as_json:
        print_json(answers)
    if any(row["state"] == FAILS for each in found for row in each.checks()):
        raise typer.Exit(1)


def _numbers(text: str) -> list[int] | None:
    words = [word.strip() for word in text.split(",")] if text else []
    if not all(word.isdecimal() for word in words):
        raise ConfigError(f"expected seeds like 3,4,5, found {text!r}", seeds=text)
    return list(dict.fromkeys(map(int, words))) or None


@contextmanager
def _progress() -> Iterator[Listener]:
    """Yield a function that shows the latest message of any run behind a progress bar; the first one shows the bar."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    bar = Progress(*columns, console=errors)
    shown = bar.add_task("", total=None)

    def report(task: Task, tasks: int, news: str | Record) -> None:
        bar.start()
        text = news if isinstance(news, str) else f"{news.cpu_seconds:.0f} s of processor time"
        bar.update(shown, total=tasks, advance=news is not text, description=f"{task.label}: {text}")

    try:
        yield report
    finally:
        if bar.live.is_started:
            bar.stop()
