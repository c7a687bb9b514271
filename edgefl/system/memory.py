"""Memory and processors of the machine and of processes, and control of the garbage collector."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import math
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_GROUP = Path("/sys/fs/cgroup/memory.max")


def most_bytes() -> int:
    """Return the memory of the machine in bytes, or the limit of its control group if that is less; 0 if unknown."""
    most = 0
    if sys.platform != "win32":
        with suppress(ValueError, OSError):
            most = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):  # no limit is the word max
        most = min(most or 1 << 62, int(_GROUP.read_text()))
    return most


def release_freed() -> None:
    """Return memory that was freed, but is kept by the C allocator, to the operating system (Linux with glibc)."""
    with suppress(OSError, AttributeError):  # another C library than GNU's
        ctypes.CDLL(None).malloc_trim(0)


def status_bytes(field: str, pid: int | str = "self") -> int:
    """Return a ``field`` of ``/proc/PID/status`` of a process, such as VmHWM, in bytes; 0 if it is not available."""
    with suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    return 0


_QUOTAS = (Path("/sys/fs/cgroup/cpu.max"), Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"))
_PERIOD = Path("/sys/fs/cgroup/cpu/cpu.cfs_period_us")


def cores() -> int:
    """Return the number of processors that this process may use, by affinity and control group; at least 1."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _quota()
    return allowed if quota is None else max(1, min(allowed, math.ceil(quota)))


def _quota() -> float | None:
    """Return the number of processors that the control group allows, possibly fractional; None if there is no known
    limit.
    """
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
def without_collector() -> Iterator[None]:
    """Open a context without garbage collection, for code that builds large lasting objects.

    The collector would scan them again and again. It is disabled for all threads of the process.
    """
    searching = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if searching:
            gc.enable()


@contextlib.contextmanager
def uncollected_objects() -> Iterator[None]:
    """Open a context without garbage collection. At its end, exclude all existing objects from later collections.

    Use it to build objects that live as long as the process. Forked processes exclude them too.
    """
    with without_collector():
        yield
        gc.freeze()
