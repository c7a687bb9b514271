"""``python -m reproduce``, from a clone of the repository."""

from __future__ import annotations

import typer

from edgefl.cli import reported_errors
from edgefl.cli.options import help_of
from reproduce.command import reproduce

app = typer.Typer(
    context_settings={"help_option_names": ["--help", "-h"]},
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.command(help=help_of(reproduce))(reproduce)

if __name__ == "__main__":
    with reported_errors(lambda: app):
        app()
