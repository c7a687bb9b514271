"""Memory of the machine and of processes, and when Python searches it for garbage."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_GROUP = Path("/sys/fs/cgroup/memory.max")


def most_bytes() -> int:
    """Return the memory of the machine or of the control group, whichever is less; 0 if it is not reported."""
    most = 0
    with suppress(ValueError, OSError, AttributeError):
        most = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):  # no limit is the word max
        most = min(most or 1 << 62, int(_GROUP.read_text()))
    return most


def release_freed() -> None:
    """Return freed memory that the allocator holds to the system (Linux)."""
    with suppress(OSError, AttributeError):  # another C library than GNU's
        ctypes.CDLL(None).malloc_trim(0)


def status_bytes(field: str, pid: int | str = "self") -> int:
    """Return a ``field`` of a process, such as VmHWM, in bytes; 0 if the system does not report it (not Linux)."""
    with suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    return 0


_QUOTAS = (Path("/sys/fs/cgroup/cpu.max"), Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"))
_PERIOD = Path("/sys/fs/cgroup/cpu/cpu.cfs_period_us")


def cores() -> int:
    """Processors that this process may run on, and has time on where a control group limits it; at least 1."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _quota()
    return allowed if quota is None else max(1, min(allowed, math.ceil(quota)))


def _quota() -> float | None:
    """Return the processors that the control group grants, or None without a limit or a report of it."""
    for path in _QUOTAS:
        try:
            quota, *period = path.read_text().split()
            if quota in ("max", "-1"):
                return None
            return int(quota) / int(period[0] if period else _PERIOD.read_text())
        except (OSError, ValueError, ZeroDivisionError):
            continue
    return None


@contextlib.contextmanager
def collecting_later() -> Iterator[None]:
    """No search meanwhile: what grows and stays would be walked through again and again.

    Memory that only cycles hold is free afterwards. Of the process: threads that run meanwhile are searched later too.
    """
    searching = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if searching:
            gc.enable()


@contextlib.contextmanager
def built_to_stay() -> Iterator[None]:
    """Keep the garbage collector away from objects that live as long as the process.

    It does not run in the block (:func:`collecting_later`), and scans the objects at no time later, nor in forked processes.
    """
    with collecting_later():
        yield
        gc.freeze()
