"""Resident memory of this process: measuring it, and keeping it low."""

from __future__ import annotations

import ctypes
import gc
import mmap
import resource
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path
from string import ascii_uppercase

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h
_LARGE_BYTES = 1 << 16
_MOST_BYTES = 1 << 30
_PATH_FIELD = 4  # behind the permissions: offset, device, inode, path
_FIELD_BEGINS = frozenset(ascii_uppercase)  # addresses are hexadecimal in small letters
_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_MAPPINGS = Path("/proc/self/smaps")
# Pages of a mapping that are not the file's own any more; where there are none, the file holds all of it.
_CHANGED = frozenset({"Private_Dirty:", "Shared_Dirty:", "Anonymous:", "Swap:"})


def resident_bytes() -> int:
    """Resident set size now; the peak where the system tells nothing better."""
    return _status_bytes("VmRSS") or _peak_of_process()


def peak_bytes() -> int:
    """Highest resident set size since :func:`reset_peak`."""
    return _status_bytes("VmHWM") or _peak_of_process()


def reset_peak() -> None:
    """Start a new peak measurement, where the system can (Linux)."""
    with suppress(OSError):
        _CLEAR_REFS.write_text("5")


def trim_memory() -> None:
    """Give freed memory back to the system, so that what was dropped is really gone."""
    gc.collect()
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)


def release_code(keep: str = "") -> int:
    """Take the unchanged pages of programs and libraries out of this process, but those of paths that hold ``keep``; returns
    how many bytes.

    Code and tables that starting or loading a graph has used and what follows will not: they stay in the system's cache,
    and what is needed again is mapped again from there, 64 KiB at a time. Nothing happens where the system does not tell
    (not Linux).
    """
    if not hasattr(mmap, "MADV_DONTNEED"):
        return 0
    released = 0
    with suppress(OSError, AttributeError, ValueError):
        advise = ctypes.CDLL(None).madvise
        with _MAPPINGS.open() as lines:
            spans = list(_unchanged(lines, keep))
        for start, end, resident in spans:
            if advise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_DONTNEED) == 0:
                released += resident
    return released


def _unchanged(lines: Iterable[str], keep: str) -> Iterator[tuple[int, int, int]]:
    """Start, end and resident bytes of the read-only mappings of files of which no page was ever written, but of those
    whose path holds ``keep``.

    A page that was (addresses filled in when the library was loaded) would come back from the file without that. Only of
    files with code: another thread may take data away meanwhile, and put something else at its address.
    """
    current: tuple[int, int, str] | None = None
    resident, changed = 0, 0
    spans: list[tuple[int, int, int, str]] = []
    with_code: set[str] = set()
    for line in chain(lines, ["0-0 ---p 0 0 0 end"]):
        if line[0] not in _FIELD_BEGINS:
            if current is not None and resident and not changed:
                spans.append((*current[:2], resident, current[2]))
            current, resident, changed = _read_only(line, keep), 0, 0
            if current is not None and "x" in line.split(maxsplit=2)[1]:
                with_code.add(current[2])
        elif current is not None:
            field, count, *_ = line.split(maxsplit=2)
            if field == "Rss:":
                resident = int(count) * 1024
            elif field in _CHANGED:
                changed += int(count)
    yield from ((start, end, size) for start, end, size, path in spans if path in with_code)


def _read_only(line: str, keep: str) -> tuple[int, int, str] | None:
    """Start, end and path of the mapping that ``line`` begins, where it is one of a file that nobody may write."""
    addresses, permissions, *rest = line.split(maxsplit=5)
    path = rest[_PATH_FIELD - 1] if len(rest) >= _PATH_FIELD else ""
    if not path.startswith("/") or (keep and keep in path) or permissions[0] != "r" or "w" in permissions:
        return None
    start, end = (int(part, 16) for part in addresses.split("-"))
    return start, end, path.rstrip("\n")


def _status_bytes(field: str) -> int:
    try:
        for line in _STATUS.read_text().splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    except OSError:
        return 0
    return 0


def _peak_of_process() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def return_memory_early() -> None:
    """Make glibc hand every freed block of 64 KiB back to the system at once.

    By default its threshold grows with the largest block freed, up to 32 MiB, and what a training step frees then
    stays resident in a fragmented heap: 58 MB instead of 40 MB for the weak tier of ResNet-20. Costs page faults.
    """
    _returned_from(_LARGE_BYTES)


def return_memory_late() -> None:
    """Make glibc keep what is freed, for a process that soon asks for as much again: it spares page faults."""
    _returned_from(_MOST_BYTES)


def _returned_from(size: int) -> None:
    """Blocks of ``size`` bytes and more go back to the system when they are freed."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            libc = ctypes.CDLL(None)
            libc.mallopt(_M_MMAP_THRESHOLD, size)
            libc.mallopt(_M_TRIM_THRESHOLD, size)
