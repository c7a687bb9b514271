"""What this device is: its memory, and the agent that is installed on it."""

from __future__ import annotations

import os

from device_runtime.memory import resident_bytes
from edgefl.system.distribution import version


def physical_memory() -> int:
    """Bytes of memory that the machine has; those of this process where the system does not tell."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return resident_bytes()


def agent_version() -> str:
    """``edgefl/`` and its version, as a device names itself to the server."""
    return f"edgefl/{version()}"
