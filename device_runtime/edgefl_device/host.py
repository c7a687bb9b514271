"""This device: its memory, that of this process, the processor, and the installed agent."""

from __future__ import annotations

import ctypes
import functools
import gc
import hashlib
import os
import platform
import resource
import sys
import threading
from contextlib import suppress
from pathlib import Path

from edgefl.system.distribution import version
from edgefl.system.memory import release_freed, status_bytes


def physical_memory() -> int:
    """Return the bytes of memory that the machine has; those of this process if the system does not report it."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return resident_bytes()


_CPU_INFO = Path("/proc/cpuinfo")
_TOLD = ("model name", "flags", "Features", "CPU implementer", "CPU part")


@functools.cache
def processor() -> str:
    """Return the facts that decide which kernels are fast: the processor's name, and a digest of its features if they
    are known."""
    told = _facts()
    known = [told[name] for name in _TOLD if name in told]
    name = told.get("model name") or platform.processor() or platform.machine()
    return f"{name} {hashlib.sha256(repr(known).encode()).hexdigest()[:12]}" if known else name


@functools.cache
def processor_features() -> frozenset[str]:
    """Return the instruction sets of the processor by Linux's names, such as ``avx2``; empty where the system names none."""
    facts = _facts()
    return frozenset((facts.get("flags") or facts.get("Features") or "").split())


def _facts() -> dict[str, str]:
    """Return what the system writes of a processor, by name."""
    try:
        lines = _CPU_INFO.read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}


def agent_version() -> str:
    """Return ``edgefl/`` and its version, as a device names itself to the server."""
    return f"edgefl/{version()}"


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
