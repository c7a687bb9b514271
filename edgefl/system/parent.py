"""A process that ends with the one that started it, however that one ends: also by SIGKILL.

There are two ways, because no single one serves both. :func:`end_by_signal` asks the kernel (Linux) for SIGTERM, which a
server or a device answers by an orderly end; it needs no thread and leaves standard input alone. But the kernel means the
*thread* that started the process. So a process that a passing thread starts, to measure something, gets a
:func:`sign_of_life` as its standard input and calls :func:`end_with_input`, on any system.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

PARENT = "EDGEFL_PARENT"
"""Environment variable with the pid of the process that supervises this one."""

_PR_SET_PDEATHSIG = 1


def end_by_signal() -> None:
    """Be terminated when the supervisor is gone (Linux). Without a supervisor, nothing happens."""
    parent = os.environ.get(PARENT)
    if not parent or sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(parent):  # it was gone before we asked
        sys.exit(1)


@contextmanager
def sign_of_life() -> Iterator[int]:
    """Standard input for a process that is to end with this one: it never gets a byte."""
    read, write = os.pipe()
    try:
        yield read
    finally:
        os.close(write)
        os.close(read)


def end_with_input() -> None:
    """End this process, whose standard input is a :func:`sign_of_life`, when its parent is gone."""
    threading.Thread(target=_wait_for_end_of_input, name="parent", daemon=True).start()


def _wait_for_end_of_input() -> None:
    while os.read(0, 1):
        pass
    os._exit(1)
