"""``edgefl reproduce``: results of the papers, run again."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edgefl.cli.output import console, human, print_json, print_table, progress
from edgefl.system.files import write_text

if TYPE_CHECKING:
    from edgefl.analysis.reproduce.report import ReproductionReport

_HELP = """
Run a result of a paper again and print every number beside the one it should be.

The exit code is 1 where a number or an ordering is not as it should be. Without a name: what there is.

Examples:

  edgefl reproduce

  edgefl reproduce fafed/counterexample --out plots

  edgefl reproduce fafed/counterexample --steps 2000 --json

  edgefl reproduce embracingfl/device --quick
"""


def register(app: typer.Typer) -> None:
    app.command("reproduce", help=_HELP)(reproduce)


def reproduce(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="like fafed/counterexample")] = None,
    out: Annotated[Path | None, typer.Option(help="folder for the charts (SVG)")] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="bound on every run; numbers that need more are left out")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="the same in small, where there is such a thing")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object: rows, agrees, ...")] = False,
) -> None:
    from edgefl.api.analysis import reproduce as run_again

    if name is None:
        _list(as_json)
        return
    began = time.perf_counter()
    with progress() as tell:
        report = run_again(name, steps=steps, quick=quick, progress=tell)
    files = _written(report, out) if out else []
    conclude(name, report, files, time.perf_counter() - began, as_json=as_json)


def conclude(
    name: str, report: ReproductionReport, files: list[str], seconds: float, *, as_json: bool
) -> None:
    """Says it all; typer.Exit(1) where something is not as it should be."""
    if as_json:
        answer = {"rows": report.rows, "agrees": report.agrees, "note": report.note, "charts": files}
        print_json({"name": name, "seconds": round(seconds, 1), **answer})
    else:
        _show(name, report, files)
    if not report.agrees:
        raise typer.Exit(1)


def _list(as_json: bool) -> None:
    from edgefl.api.analysis import reproductions

    rows = [{"name": each.name, "what": each.what} for each in reproductions().values()]
    if as_json:
        print_json(rows)
    else:
        print_table("reproductions", rows)


def _written(report: ReproductionReport, folder: Path) -> list[str]:
    for name, text in report.charts.items():
        write_text(folder / name, text)
    return [str(folder / name) for name in report.charts]


def _show(name: str, report: ReproductionReport, files: list[str]) -> None:
    rows = [
        {
            "run": row.run,
            "quantity": row.quantity,
            "found": f"{row.found:.8g}",
            "expected": "-" if row.expected is None else f"{row.expected:.8g}",
            "agrees": row.agrees,
        }
        for row in report.rows
    ]
    print_table(name, rows, report.note)
    for file in files:
        console.print(f"chart: {file}", markup=False, highlight=False, soft_wrap=True)
    wrong = sum(not row.agrees for row in report.rows)
    console.print(f"{len(rows) - wrong} of {human(len(rows))} agree", highlight=False)
