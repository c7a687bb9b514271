"""Benchmarks called in this process."""

from __future__ import annotations

from typing import Any

from benchmarks.__main__ import command_line
from tests.cli.runner import runner


def invoke(name: str, *arguments: str) -> Any:
    """Run a benchmark's command and return click's result."""
    return runner().invoke(command_line([name]), [name, *arguments])
