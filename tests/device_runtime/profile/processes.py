"""Processes that measure, as the system lists them."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from edgefl_device.profile.measure.round import GRAPH
from tests.wire.mqtt.events import PATIENCE_S, wait_until

ENDLESS = "100000000"
"""Repeats that take the smallest graph the better part of an hour: a round, which comes first, has none."""


@contextmanager
def measuring(process: subprocess.Popen[bytes]) -> Iterator[list[int]]:
    """The processes below ``process`` once one of them measures a graph. All end with the context, whatever failed."""
    below: list[int] = []
    try:
        wait_until(lambda: any(GRAPH.encode() in _command(pid) for pid in _below(process.pid)), "it measures")
        below = _below(process.pid)
        yield below
    finally:
        process.kill()
        process.wait(PATIENCE_S)
        for pid in filter(runs, below):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def runs(pid: int) -> bool:
    """Whether a process is more than an entry that nobody asked for yet."""
    return bool(_command(pid))


def _below(pid: int) -> list[int]:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        children = []
    return [each for child in map(int, children) for each in (child, *_below(child))]


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
