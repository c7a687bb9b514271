"""End child processes, and quote what they wrote last."""

from __future__ import annotations

import subprocess
from typing import Any


def end_process(process: subprocess.Popen[Any], within_s: float = 10.0) -> None:
    """Terminate ``process``, and kill it if it still runs after ``within_s`` seconds."""
    process.terminate()
    try:
        process.wait(within_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def last_line(text: str, otherwise: str) -> str:
    """Return the last line of ``text`` that is not blank, or ``otherwise`` if there is none."""
    lines = text.strip().splitlines()
    return lines[-1].strip() if lines else otherwise
