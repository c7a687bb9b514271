"""``edgefl replay``: a run again, from the updates that its server kept."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edgefl.api.progress import reporting
from edgefl.cli.options import Database, Processor, ProcessorOption, add_group, existing
from edgefl.cli.output import console, print_json, print_table

if TYPE_CHECKING:
    from edgefl.analysis.replay import Replayed
    from edgefl.simulator.replay import ReplayedRound


def replay(
    folder: Annotated[
        Path,
        typer.Argument(
            callback=existing, help="folder of the run: --out of `edgefl run`, or of `edgefl server`"
        ),
    ],
    config: Annotated[
        Path | None, typer.Option(help="federation file (TOML); default: the one in the folder")
    ] = None,
    database: Database = "",
    data: Annotated[
        Path | None, typer.Option(callback=existing, help="folder with the dataset's standard files")
    ] = None,
    processor: ProcessorOption = Processor.auto,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object per round, nothing else")] = False,
) -> None:
    """Repeat the sums of a run from its journal.

    They are repeated bit for bit; the first difference is named, if there is one.

    The run needs its updates: set round.keep_updates = true before it begins. Synchronous and buffered runs are repeated
    alike. Exit code 1: a round came to other bits.

    Examples:

      edgefl replay runs/first

      edgefl replay runs/fleet --config federation.toml --json      (a server's folder)
    """

    from edgefl.config.reading import check_names
    from edgefl.lab.run_folder import config_of, journal_of

    # Torch, which all that follows loads, takes seconds.
    check_names(config or config_of(folder), {"data.dir": str(data.resolve())} if data else {})
    if not database:
        journal_of(folder)
    from edgefl.analysis.replay import replay as repeat

    rows: list[dict[str, object]] = []

    def told(each: ReplayedRound) -> None:
        row = _row(each)
        rows.append(row)
        if as_json:
            print_json(row)
        else:
            tell(f"round {each.round}")

    with reporting("reading the run") as tell:
        done = repeat(folder, config, database=database, data=data, device=processor.value, watch=told)
    if not as_json:
        print_table(
            f"{folder}, repeated",
            [{**row, "weights_sha256": str(row["weights_sha256"])[:12]} for row in rows],
        )
        console.print(_verdict(done))
    if not done.same:
        raise typer.Exit(1)


def _row(each: ReplayedRound) -> dict[str, object]:
    return {
        "round": each.round,
        "outcome": each.outcome,
        "updates": each.updates,
        "late": each.late,
        "weights_sha256": each.weights_sha256,
        "same": each.same,
    }


def _verdict(done: Replayed) -> str:
    if done.same:
        return f"all {len(done.rounds)} rounds came to the same bits"
    last = done.rounds[-1]
    if last.weights_sha256 == last.journaled:
        return f"round {last.round} evaluates its model to other results than the journal has"
    where = ", ".join(f"{name} ({count} entries)" for name, count in sorted(done.differ.items()))
    return (
        f"round {last.round} came to {last.weights_sha256[:12]}, and the journal has {last.journaled[:12]}: "
        + (
            f"they differ in {where}"
            if where
            else "its checkpoint is gone, so that the tensors are not known"
        )
    )


_HELP = """
Check the log of who did what in each round of a run.
"""


def register(app: typer.Typer) -> None:
    add_group(app, "audit", _HELP, verify)


def verify(
    folder: Annotated[Path, typer.Argument(help="folder of a run, or of a server (its --out)")],
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object")] = False,
) -> None:
    """Check every line of a run's log.

    Exit code 1 if one was changed, removed or added.

    Whoever can write the folder can write the whole log anew: keep the last hash, which is printed, where they cannot.

    Examples:

      edgefl audit verify runs/fleet

      edgefl audit verify runs/fleet --json
    """

    from edgefl_server.storage.audit import verify as verified

    found = verified(folder)
    if as_json:
        print_json(found)
    else:
        for problem in found.problems:
            console.print(problem)
        state = "is not as it was written" if found.problems else "is whole"
        console.print(
            f"{folder} {state}: {found.lines} lines, {found.rounds} rounds, {found.updates} updates, last hash {found.head}"
        )
    if found.problems:
        raise typer.Exit(1)
