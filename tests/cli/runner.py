"""Commands called in this process, what they print and what they say to people apart."""

from __future__ import annotations

from inspect import signature

from typer.testing import CliRunner


def runner() -> CliRunner:
    """Before click 8.2 both streams are one unless told otherwise."""
    apart = {"mix_stderr": False} if "mix_stderr" in signature(CliRunner).parameters else {}
    return CliRunner(**apart)
