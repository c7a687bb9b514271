"""Help of a command with many options on one screen, --help-all, and --version."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperCommand

_EXAMPLES = "\n\nExamples:"


class ShortHelp(TyperCommand):
    """A command whose ``--help`` leaves out the options that have a panel, and the examples behind the first ones."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        more = [each for each in self.params if getattr(each, "rich_help_panel", None)]
        more = more if any(each.name == "help_all" for each in self.params) else []
        text, examples = self.help or "", ""
        if more:
            first, _, examples = text.partition(_EXAMPLES)
            self.help = first + _EXAMPLES + examples.partition("\n\n")[0] if examples else first
        _show(more, hidden=True)
        try:
            super().format_help(ctx, formatter)
        finally:
            self.help = text
            _show(more, hidden=False)


def _show(options: list[Any], *, hidden: bool) -> None:
    for each in options:
        each.hidden = hidden


def _print_all(ctx: typer.Context, value: bool) -> None:
    if value:
        TyperCommand.format_help(ctx.command, ctx, ctx.make_formatter())  # type: ignore[arg-type]
        raise typer.Exit


HelpAll = Annotated[
    bool,
    typer.Option("--help-all", is_eager=True, callback=_print_all, help="Show all options and examples."),
]


def _print_version(wanted: bool) -> None:
    if wanted:
        from edgefl.system.distribution import NAME, version

        typer.echo(f"{NAME} {version()}")
        raise typer.Exit


def version_option(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """The options of ``edgefl`` itself."""
