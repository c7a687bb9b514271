"""``edgefl audit``: whether what a server wrote down of its rounds is what it wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from edgefl.cli.output import console, print_json

_HELP = """
The log of who did what in each round of a run, `audit.jsonl`, whose lines vouch for each other.
"""


def register(app: typer.Typer) -> None:
    group = typer.Typer(help=_HELP, no_args_is_help=True)
    group.command("verify")(verify)
    app.add_typer(group, name="audit")


def verify(
    folder: Annotated[Path, typer.Argument(help="folder of a run, or of a server (its --out)")],
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object")] = False,
) -> None:
    """Check every line of a run's log; exit code 1 if one was changed, removed or added.

    Whoever can write the folder can write the whole log anew: keep the last hash, which is printed, where they cannot.

    Examples:

      edgefl audit verify runs/fleet

      edgefl audit verify runs/fleet --json
    """

    from server.storage.audit import verify as verified

    found = verified(folder)
    if as_json:
        print_json(found)
    else:
        for problem in found.problems:
            console.print(problem, soft_wrap=True)
        state = "is not as it was written" if found.problems else "is whole"
        console.print(
            f"{folder} {state}: {found.lines} lines, {found.rounds} rounds, {found.updates} updates, last hash {found.head}",
            soft_wrap=True,
        )
    if found.problems:
        raise typer.Exit(1)
