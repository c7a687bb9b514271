"""Commands called in this process, what they print and what they say to people apart."""

from __future__ import annotations

from inspect import signature
from pathlib import Path

import typer
from typer.testing import CliRunner

from edgefl.cli.commands import app


def runner() -> CliRunner:
    """Before click 8.2 both streams are one unless told otherwise."""
    apart = {"mix_stderr": False} if "mix_stderr" in signature(CliRunner).parameters else {}
    return CliRunner(**apart)


def edgefl(*arguments: str | Path) -> str:
    """Return what a command prints; raise what it refuses."""
    ran = runner().invoke(app, list(map(str, arguments)))
    if ran.exception and not isinstance(ran.exception, SystemExit | typer.Exit):
        raise ran.exception
    assert ran.exit_code == 0, ran.output
    return ran.stdout
