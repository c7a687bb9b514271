"""Commands of a test, run to their end."""

from __future__ import annotations

import subprocess
import sys
from typing import Any


def run_command(
    *words: object, check: bool = False, timeout: float = 300.0, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; what it prints is captured as text."""
    command = [str(word) for word in words]
    return subprocess.run(command, check=check, capture_output=True, text=True, timeout=timeout, **options)


def run_python(*words: object, **options: Any) -> subprocess.CompletedProcess[str]:
    return run_command(sys.executable, *words, **options)
