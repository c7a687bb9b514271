"""``edgefl --version``: a server and its devices may be compared by it."""

from __future__ import annotations

from typing import Annotated

import typer


def _show(wanted: bool) -> None:
    if wanted:
        from edgefl.system.distribution import NAME, version

        typer.echo(f"{NAME} {version()}")
        raise typer.Exit


def version_option(
    version: Annotated[
        bool, typer.Option("--version", callback=_show, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """The options of ``edgefl`` itself."""
