"""``edgefl`` without its commands."""

from __future__ import annotations

import typer


def empty() -> typer.Typer:
    return typer.Typer(
        name="edgefl",
        help="Federated learning on real devices: submodels that fit, compiled with their training algorithm.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
    )
