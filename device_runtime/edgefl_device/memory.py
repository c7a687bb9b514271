"""Resident memory of this process: measuring it, and keeping it low."""

from __future__ import annotations

import ctypes
import gc
import resource
import sys
import threading
from contextlib import suppress
from pathlib import Path

from edgefl.system.memory import release_freed, status_bytes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # glibc's malloc.h
_LARGE_BYTES = 1 << 18
_MOST_BYTES = 1 << 30
_CLEAR_REFS = Path("/proc/self/clear_refs")


def resident_bytes() -> int:
    """Return the resident set size; the peak if the system reports nothing better."""
    return status_bytes("VmRSS") or _peak_of_process()


def anonymous_bytes(pid: int | str = "self") -> int:
    """Return the resident memory of a process that no file backs.

    Where the system does not report it (not Linux), return all resident memory of this process.
    """
    return status_bytes("RssAnon", pid) or resident_bytes()


def peak_bytes() -> int:
    """Return the highest resident set size since :func:`reset_peak`."""
    return status_bytes("VmHWM") or _peak_of_process()


def reset_peak() -> None:
    """Start a new peak measurement, where the system can (Linux)."""
    with suppress(OSError):
        _CLEAR_REFS.write_text("5")


def trim_memory() -> None:
    """Give freed memory back to the system, so that what was dropped is really gone."""
    gc.collect()
    release_freed()


def _peak_of_process() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def return_memory_early() -> None:
    """Make glibc hand every freed block of 256 KiB back to the system at once, and the heap's end once 1 MiB of it is free.

    By default these grow with the largest block freed, up to 32 and 64 MiB, and what a training step frees then stays
    resident in a fragmented heap: 58 MB instead of 40 MB for the weak tier of ResNet-20. Costs page faults, but not for
    chunks of updates: these have 128 KiB, and each is copied a few times. Threads that begin from now on share the heaps
    that there are: with one of its own, what a round's thread has freed would be of no use to the next. All of it is for
    the whole process, the last for good.
    """
    _keep(below=_LARGE_BYTES, at_the_end=4 * _LARGE_BYTES)
    _set(_M_ARENA_MAX, 1)


def reserve_stack() -> None:
    """Run an empty thread, whose stack glibc keeps for the next thread.

    ``RLIMIT_DATA`` counts the addresses of a stack, often 8 MiB. A limit that is set on an idle agent then leaves as much
    room for a round's worker.
    """
    thread = threading.Thread(target=int)
    thread.start()
    thread.join()


def return_memory_late() -> None:
    """Make glibc keep what is freed, for a process that soon asks for as much again: it spares page faults."""
    _keep(below=_MOST_BYTES, at_the_end=_MOST_BYTES)


def _keep(*, below: int, at_the_end: int) -> None:
    """Keep freed blocks of less than ``below`` bytes, and so many bytes at the heap's end."""
    _set(_M_MMAP_THRESHOLD, below)
    _set(_M_TRIM_THRESHOLD, at_the_end)


def _set(parameter: int, value: int) -> None:
    """Set a parameter of glibc's malloc; does nothing with another C library."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).mallopt(parameter, value)
