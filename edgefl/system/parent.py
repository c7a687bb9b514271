"""Processes of a lab end with the process that started them, even if that one is killed."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PARENT = "EDGEFL_PARENT"
"""Environment variable with the pid of the supervising process."""

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Be terminated when the supervisor is gone (Linux). Without a supervisor, nothing happens."""
    parent = os.environ.get(PARENT)
    if not parent or sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(parent):  # it was gone before we asked
        sys.exit(1)
