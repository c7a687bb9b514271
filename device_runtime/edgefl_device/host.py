"""Facts about this machine and process: memory, processor, and version of the agent."""

from __future__ import annotations

import ctypes
import functools
import gc
import hashlib
import os
import platform
import sys
import threading
from contextlib import suppress
from pathlib import Path

from edgefl.system.distribution import version
from edgefl.system.memory import release_freed, status_bytes


def physical_memory() -> int:
    """Return the bytes of the machine's memory; this process's resident bytes if the system does not report them."""
    if sys.platform != "win32":
        with suppress(ValueError, OSError):
            return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return resident_bytes()


_CPU_INFO = Path("/proc/cpuinfo")
_TOLD = ("model name", "flags", "Features", "CPU implementer", "CPU part")


@functools.cache
def processor() -> str:
    """Return the processor's name and, if known, a digest of its features: a key for results that depend on kernel
    speed.
    """
    told = _facts()
    known = [told[name] for name in _TOLD if name in told]
    name = told.get("model name") or platform.processor() or platform.machine()
    return f"{name} {hashlib.sha256(repr(known).encode()).hexdigest()[:12]}" if known else name


@functools.cache
def processor_features() -> frozenset[str]:
    """Return the processor's instruction sets by Linux's names, such as ``avx2``; an empty set if the system lists none."""
    facts = _facts()
    return frozenset((facts.get("flags") or facts.get("Features") or "").split())


def _facts() -> dict[str, str]:
    """Return the fields of ``/proc/cpuinfo`` by name; empty if there is no such file."""
    try:
        lines = _CPU_INFO.read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}


def agent_version() -> str:
    """Return ``edgefl/<version>``, which a device sends to the server."""
    return f"edgefl/{version()}"


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # glibc's malloc.h
_LARGE_BYTES = 1 << 18
_MOST_BYTES = 1 << 30


def resident_bytes() -> int:
    """Return the resident set size of this process; its peak if the system reports only that; 0 on Windows."""
    return status_bytes("VmRSS") or _peak_of_process()


def anonymous_bytes(pid: int | str = "self") -> int:
    """Return the resident memory of process ``pid`` that is not backed by a file.

    Where the system does not report it (not Linux), return all resident memory of this process instead.
    """
    return status_bytes("RssAnon", pid) or resident_bytes()


def peak_bytes() -> int:
    """Return the highest resident set size of this process so far."""
    return status_bytes("VmHWM") or _peak_of_process()


def trim_memory() -> None:
    """Collect garbage and return freed memory to the system."""
    gc.collect()
    release_freed()


def _peak_of_process() -> int:
    if sys.platform == "win32":
        return 0
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def return_memory_early() -> None:
    """Make glibc return every freed block of 256 KiB to the system at once, and the heap's end once 1 MiB of it is free.

    By default these limits grow with the largest freed block, up to 32 and 64 MiB. What a training step frees then
    stays resident in a fragmented heap: 58 MB instead of 40 MB for the weak tier of ResNet-20. The cost is page
    faults, but not for chunks of updates, which have 128 KiB and are copied a few times. New threads share the
    existing heaps, so that memory freed by one round's thread is of use to the next. All settings apply to the whole
    process. The shared heaps cannot be undone.
    """
    _keep(below=_LARGE_BYTES, at_the_end=4 * _LARGE_BYTES)
    _set(_M_ARENA_MAX, 1)


def reserve_stack() -> None:
    """Run an empty thread, whose stack glibc keeps for the next thread.

    ``RLIMIT_DATA`` counts the addresses of a stack, often 8 MiB. A limit that is set on an idle agent then includes
    the stack of a round's thread.
    """
    thread = threading.Thread(target=int)
    thread.start()
    thread.join()


def return_memory_late() -> None:
    """Make glibc keep freed memory, for a process that soon allocates as much again; saves page faults."""
    _keep(below=_MOST_BYTES, at_the_end=_MOST_BYTES)


def _keep(*, below: int, at_the_end: int) -> None:
    """Make glibc keep freed blocks below ``below`` bytes, and up to ``at_the_end`` free bytes at the heap's end."""
    _set(_M_MMAP_THRESHOLD, below)
    _set(_M_TRIM_THRESHOLD, at_the_end)


def _set(parameter: int, value: int) -> None:
    """Set a parameter of glibc's malloc. Does nothing with another C library."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).mallopt(parameter, value)
