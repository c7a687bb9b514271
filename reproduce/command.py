"""``python -m reproduce``: results of the papers, run again."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edgefl.cli.options import writable_folder
from edgefl.cli.output import console, errors, print_json, print_table
from reproduce.catalog import NAMES, expand
from reproduce.entry import checked_scale

if TYPE_CHECKING:
    from reproduce.campaign import TaskEvent
    from reproduce.record import Summary


def reproduce(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="like fafed/counterexample, or a paper")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="all entries")] = False,
    scale: Annotated[str, typer.Option(help="smoke, cpu or paper")] = "smoke",
    seeds: Annotated[int, typer.Option(min=0, help="seeds of each arm; 0: as many as the entry says")] = 0,
    out: Annotated[
        Path, typer.Option(callback=writable_folder, help="folder for tables, pictures and runs")
    ] = Path("reproductions"),
    jobs: Annotated[int, typer.Option(min=0, help="runs at a time; 0: one for each processor")] = 0,
    fresh: Annotated[bool, typer.Option("--fresh", help="run again what is finished")] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="exit code 1 where any claim does not hold")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON array, a summary for each entry")] = False,
) -> None:
    """Run results of the papers again: a table with the paper's numbers beside ours, pictures, and which claims held.

    Scales: `smoke` ends every run after a few rounds, as a smoke test; `cpu` fits two cores and an evening; `paper` is
    what the paper ran. Finished runs are kept: the same command resumes what was stopped. Without a name, list the entries.

    The exit code is 1 where a claim that has to hold at every scale (an exact number, a theorem) does not; with --strict
    where any claim does not.

    Examples:

      python -m reproduce

      python -m reproduce fafed/counterexample --scale cpu

      python -m reproduce fedbat --scale cpu --seeds 3 --out results      (all entries of a paper)

      python -m reproduce --all --scale smoke
    """

    if not names and not everything:
        _list(as_json)
        return
    # Both are checked before torch is imported, which takes seconds.
    known_scale = checked_scale(scale)
    chosen = expand(NAMES if everything else names or [])
    from reproduce.campaign import reproduce as run_again

    watch = _Watch()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with watch:
            found = run_again(
                chosen, out, scale=known_scale, seeds=seeds, jobs=jobs, fresh=fresh, tell=watch.tell
            )
    except KeyboardInterrupt:
        errors.print("stopped; the same command goes on where it was")
        raise typer.Exit(130) from None
    conclude(found, out, strict=strict, as_json=as_json)


def _list(as_json: bool) -> None:
    from reproduce.campaign import ENTRIES

    rows: list[dict[str, object]] = [{"name": each.name, "what": each.what} for each in ENTRIES.values()]
    print_json(rows) if as_json else print_table("reproductions", rows)


def conclude(found: list[Summary], out: Path, *, strict: bool, as_json: bool) -> None:
    """Says it all; typer.Exit(1) where something is not as it has to be."""
    if as_json:
        print_json(found)
    else:
        for summary in found:
            _show(summary, out)
    failed = [
        claim for summary in found for claim in summary.claims if not claim.held and (strict or claim.exact)
    ]
    if failed:
        raise typer.Exit(1)


def _show(summary: Summary, out: Path) -> None:
    rows: list[dict[str, object]] = [
        {
            "claim": f"{each.rank}: {each.text}",
            "paper": each.paper or "-",
            "ours": each.ours,
            "held": each.held,
        }
        for each in summary.claims
    ]
    if rows:
        print_table(summary.entry, rows)
    place = out / summary.entry / "README.md"
    console.print(f"{summary.entry}: {place}")


class _Watch:
    """A bar over all runs, and what the last one to speak does."""

    def __init__(self) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
        self._bar = Progress(*columns, console=errors)
        self._total = 0

    def __enter__(self) -> _Watch:
        self._bar.__enter__()
        self._task = self._bar.add_task("", total=None)
        return self

    def __exit__(self, *raised: object) -> None:
        self._bar.__exit__(*raised)  # type: ignore[arg-type]

    def tell(self, told: TaskEvent) -> None:
        about = f"{told.task.entry}, {told.task.arm}, seed {told.task.seed}"
        total = told.of or None
        if told.record is None:
            self._bar.update(self._task, total=total, description=f"{about}: {told.text}")
        else:
            done = "was there" if told.kept else f"{told.record.seconds:.0f} s"
            self._bar.update(self._task, total=total, advance=1, description=f"{about}: {done}")
