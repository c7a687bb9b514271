"""Memory of the machine and of processes."""

from __future__ import annotations

import os
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


def status_bytes(field: str, pid: int | str = "self") -> int:
    """Return a ``field`` of a process, such as VmHWM, in bytes; 0 if the system does not report it (not Linux)."""
    with suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    return 0
