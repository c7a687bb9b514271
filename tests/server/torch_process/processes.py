"""Processes that a server starts, as the system sees them."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

_PATIENCE_S = 120.0


def torch_process_of(server: int) -> int:
    """The process that a server has started, from whichever of its threads; 0 while there is none."""
    for children in Path(f"/proc/{server}/task").glob("*/children"):
        with suppress(OSError):  # that thread has ended
            if pids := children.read_text().split():
                return int(pids[0])
    return 0


def gone(pid: int) -> bool:
    """Whether a process has ended, also if nobody has asked how."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while not gone(pid):
        assert time.monotonic() < deadline, f"process {pid} outlived its server"
        time.sleep(0.02)
