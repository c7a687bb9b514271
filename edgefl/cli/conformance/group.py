"""The commands of ``edgefl conformance``."""

from __future__ import annotations

import typer

from edgefl.cli.conformance import check, vectors

_HELP = "The conformance kit: prove that a device agent, in whatever language, does what the protocol says."


def register(app: typer.Typer) -> None:
    group = typer.Typer(help=_HELP, no_args_is_help=True, rich_markup_mode="rich")
    check.register(group)
    vectors.register(group)
    app.add_typer(group, name="conformance")
