"""Number of processors of this process."""

from __future__ import annotations

import math
import os
from pathlib import Path

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
