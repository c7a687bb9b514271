"""Release of memory that a process most likely does not need again (Linux only; no effect elsewhere)."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_MAPPINGS = Path("/proc/self/smaps")
_DONT_NEED = 4  # MADV_DONTNEED
_NOTICEABLE = 8 << 20


def release_freed() -> None:
    """Return freed memory that the allocator holds to the system."""
    with suppress(OSError, AttributeError):  # another C library than GNU's
        ctypes.CDLL(None).malloc_trim(0)


def give_back(library: str) -> int:
    """Release freed memory, and drop the pages of a loaded library that equal its file, if these are many.

    A later call of the library reads them again. Returns the bytes of the dropped pages.
    """
    if not _MAPPINGS.exists():
        return 0
    release_freed()
    libc = ctypes.CDLL(None)
    found = list(_unchanged(library))
    nbytes = sum(resident for _, _, resident in found)
    if nbytes < _NOTICEABLE:
        return 0
    for start, length, _ in found:
        libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), _DONT_NEED)
    return nbytes


def _unchanged(library: str) -> Iterator[tuple[int, int, int]]:
    """Yield (address, length, resident bytes) of the read-only, unmodified mappings of a library."""
    start = length = resident = 0
    with suppress(OSError), _MAPPINGS.open() as mappings:
        for line in mappings:
            key, *values = line.split()
            if not key.endswith(":"):  # the head of a mapping: addresses, rights, ..., file
                first, _, last = key.partition("-")
                own = library in values[-1] and "w" not in values[0]
                start, length = int(first, 16), int(last, 16) - int(first, 16) if own else 0
            elif key == "Rss:":
                resident = int(values[0]) << 10
            elif key == "Anonymous:" and length and values[0] == "0":
                yield start, length, resident
