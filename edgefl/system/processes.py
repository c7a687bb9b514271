"""End child processes, and quote what they wrote last."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any


def end_process(process: subprocess.Popen[Any], within_s: float = 10.0) -> None:
    """Terminate ``process``, and kill it if it still runs after ``within_s`` seconds."""
    process.terminate()
    try:
        process.wait(within_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextmanager
def child_process(
    command: Sequence[str], *, within_s: float = 10.0, **options: Any
) -> Iterator[subprocess.Popen[Any]]:
    """Run ``command`` while the block runs, then end it as :func:`end_process` and close its pipes.

    Args:
        command: the program and its arguments.
        within_s: seconds that the process has to end before it is killed.
        options: those of :class:`subprocess.Popen`.
    """
    process = subprocess.Popen(command, **options)
    try:
        yield process
    finally:
        end_process(process, within_s)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


def last_line(text: str, otherwise: str) -> str:
    """Return the last line of ``text`` that is not blank, or ``otherwise`` if there is none."""
    lines = text.strip().splitlines()
    return lines[-1].strip() if lines else otherwise
