"""``edgefl bench peer``: an environment for software that is measured beside ours."""

from __future__ import annotations

from typing import Annotated

import typer

from edgefl.cli.output import errors, print_json, print_table


def peer(
    name: Annotated[str, typer.Argument(metavar="[NAME]", help="whose environment to make")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object for each")] = False,
) -> None:
    """Make an environment for software of others that a benchmark measures, and print the path of its Python.

    Its requirements would hold ours back, so it is apart: in the user's cache folder, made once. Without a name: which there
    are, and whether they are installed.

    Examples:

      edgefl bench peer

      edgefl bench peer flower
    """

    from edgefl.bench.common.peers import interpreter, make, peers
    from edgefl.wire.errors import ConfigError

    known = peers()
    if name and name not in known:
        raise ConfigError(f"no peer {name!r}; there are: {', '.join(known)}", name=name)
    if name:
        make(known[name], lambda text: errors.print(text, soft_wrap=True))
    rows = [
        {
            "name": each.name,
            "needed_by": each.needed_by,
            "requirements": each.requirements,
            "python": interpreter(each),
        }
        for each in ([known[name]] if name else known.values())
    ]
    if as_json:
        for row in rows:
            print_json(row)
    elif name:
        typer.echo(rows[0]["python"])
    else:
        print_table("peers", rows)
