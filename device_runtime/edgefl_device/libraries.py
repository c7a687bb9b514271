"""Code of libraries in this process: less of it mapped, and what is no longer needed let go of.

The pages stay in the system's cache either way: this is about what counts as this process's memory. 64-bit Linux only;
elsewhere, and where the system refuses, nothing happens.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from edgefl.system.collecting import collecting_later

PIECE_BYTES = 1 << 14
_SMALLEST_BYTES, _LARGEST_BYTES = 1 << 18, 1 << 26
_LEAST_RESIDENT = 1 / 16
_SHARE = 8  # of the mappings that a process may have: 65,530 as Linux comes
_PAGES = Path("/proc/self/pagemap")
_MOST_MAPPINGS = Path("/proc/sys/vm/max_map_count")
_LOADED, _WRITABLE = 1, 2  # PT_LOAD and PF_W of elf.h
_ENTRY_BYTES = 8
# The highest byte of a page's entry says whether it is there (128), swapped out (64) and the file's own (32), which a page
# that was written is not any more.
_HIGHEST = _ENTRY_BYTES - 1 if sys.byteorder == "little" else 0
_UNCHANGED, _CHANGED = re.compile(rb"[\xa0-\xbf]+"), re.compile(rb"[\x40-\x9f\xc0-\xff]")
_CUT_LOADS = 3
_cut: set[int] = set()


class _Part(NamedTuple):
    """What nobody may write of a program or library: code, or tables."""

    start: int
    end: int
    path: str


class _Header(ctypes.Structure):
    """Elf64_Phdr of elf.h."""

    _fields_ = [
        *((name, ctypes.c_uint32) for name in ("kind", "flags")),
        *(
            (name, ctypes.c_uint64)
            for name in ("offset", "address", "unused", "in_file", "nbytes", "alignment")
        ),
    ]


class _Object(ctypes.Structure):
    """dl_phdr_info of link.h."""

    _fields_ = [
        ("base", ctypes.c_uint64),
        ("name", ctypes.c_char_p),
        ("headers", ctypes.POINTER(_Header)),
        ("count", ctypes.c_uint16),
        *((name, ctypes.c_uint64) for name in ("added", "removed", "thread", "data")),
    ]


class _Loaded:
    """What is loaded, looked at anew when a library was loaded or closed since."""

    def __init__(self) -> None:
        self.changes = (0, 0)
        self.parts: list[_Part] = []
        self.graphs = 0
        """Loaded since."""
        self.pieces = 0
        """Mappings that were made of others, in all."""


_loaded = _Loaded()


@contextmanager
def sparing_code(release: bool = True) -> Iterator[None]:
    """Within it a graph is loaded: code is mapped in pieces, also what is first used there, and then let go of, if
    ``release``, which takes milliseconds."""
    with suppress(OSError, AttributeError, ValueError):
        _parts()
    cuts = _loaded.graphs < _CUT_LOADS  # each part that graphs use is in use by then
    if cuts:
        cut_code()
    yield
    if cuts:
        cut_code()
    _loaded.graphs += 1
    if release:
        release_code()  # of starting, parsing and rewriting graphs, which no step needs


def cut_code() -> int:
    """Cut the mappings of programs and libraries into pieces of :data:`PIECE_BYTES`; returns how many new ones there are.

    Around each page that is read Linux maps whatever its cache has of 64 KiB, but nothing beyond a mapping's ends: a step
    that reads 2 MB of onnxruntime, here and there, would have 9 of it. Pieces stay apart because they differ: every second
    one would be left out of a core dump, in which no code is anyway. What is mapped already stays until it is let go
    of. From the disk, Linux 6.18 reads code ahead no further than a piece goes.
    """
    advice = getattr(mmap, "MADV_DONTDUMP", None)
    if advice is None or mmap.PAGESIZE >= PIECE_BYTES:
        return 0
    made = 0
    with suppress(OSError, AttributeError, ValueError), _PAGES.open("rb", 0) as pages:
        most = int(_MOST_MAPPINGS.read_text()) // _SHARE
        for part in _parts():
            places = range(
                -(-part.start // PIECE_BYTES) * PIECE_BYTES, part.end - PIECE_BYTES, 2 * PIECE_BYTES
            )
            room = _loaded.pieces + made + 2 * len(places) <= most
            if part.start not in _cut and room and _is_worth_it(part, _flags(part, pages.fileno())):
                made += 2 * sum(_advise(place, PIECE_BYTES, advice) for place in places)
                _cut.add(part.start)
    _loaded.pieces += made
    return made


def release_code(keep: str = "") -> None:
    """Take the unchanged pages of programs and libraries out of this process, but those of paths that hold ``keep``.

    Code and tables that starting or loading a graph has used and what follows will not. What is needed again is mapped
    again from the system's cache. Pages that were written (addresses filled in when the library was loaded) stay: they
    would come back from the file without that.
    """
    if not hasattr(mmap, "MADV_DONTNEED"):
        return
    with suppress(OSError, AttributeError, ValueError), _PAGES.open("rb", 0) as pages:
        for part in _parts():
            if not (keep and keep in part.path):
                _release(part, pages.fileno())


def _release(part: _Part, pages: int) -> None:
    for run in _UNCHANGED.finditer(_flags(part, pages)):
        first, nbytes = (mmap.PAGESIZE * count for count in (run.start(), run.end() - run.start()))
        _advise(part.start + first, nbytes, mmap.MADV_DONTNEED)


def _parts() -> list[_Part]:
    """Of everything that is loaded; nothing where processors have other addresses than of 64 bits."""
    objects = _objects() if ctypes.sizeof(ctypes.c_void_p) == _ENTRY_BYTES else []
    changes = (objects[0].added, objects[0].removed) if objects else (0, 0)
    if changes != _loaded.changes:
        # In this order: a thread that sees the new count has the new parts.
        _loaded.parts, _loaded.graphs, _loaded.changes = [*chain(*map(_parts_of, objects))], 0, changes
    return _loaded.parts


def _parts_of(library: _Object) -> Iterator[_Part]:
    page = mmap.PAGESIZE
    for header in library.headers[: library.count]:
        if header.kind == _LOADED and not header.flags & _WRITABLE:
            first, behind = header.address, header.address + header.nbytes
            start, end = library.base + first // page * page, library.base + -(-behind // page) * page
            yield _Part(start, end, os.fsdecode(library.name or b""))


def _objects() -> list[_Object]:
    """What is loaded, the program first. Of a C library that tells something else: nothing.

    While it is told the list is locked, and a thread that loads a library waits for it, maybe with Python's own lock. So
    no line of Python runs meanwhile, which could hand that lock over: each entry is written to a file, by C alone.
    """
    library = ctypes.PyDLL(None)  # calls keep Python's lock
    write = library.write
    write.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t)
    write.restype = (0).__mul__  # a result of 0 goes on
    visit = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    descriptor = os.memfd_create("loaded")
    try:
        with collecting_later():  # what is collected may have something to run
            library.dl_iterate_phdr(visit(functools.partial(write, descriptor)), None)
        told = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
    finally:
        os.close(descriptor)
    each = ctypes.sizeof(_Object)
    return (
        [_Object.from_buffer_copy(told, at) for at in range(0, len(told), each)]
        if len(told) % each == 0
        else []
    )


def _flags(part: _Part, pages: int) -> bytes:
    """The highest byte of the entry of each page."""
    first, last = (address // mmap.PAGESIZE * _ENTRY_BYTES for address in (part.start, part.end))
    return os.pread(pages, last - first, first)[_HIGHEST::_ENTRY_BYTES]


def _is_worth_it(part: _Part, flags: bytes) -> bool:
    """Whether a part is large, in use, and as it stands in its file."""
    there = sum(run.end() - run.start() for run in _UNCHANGED.finditer(flags))
    unchanged = there > _LEAST_RESIDENT * len(flags) and not _CHANGED.search(flags)
    return unchanged and _SMALLEST_BYTES <= part.end - part.start <= _LARGEST_BYTES


def _advise(start: int, nbytes: int, advice: int) -> bool:
    """Whether the system took the advice about these addresses."""
    return _madvise()(start, nbytes, advice) == 0


@functools.cache
def _madvise() -> Callable[[int, int, int], int]:
    call = ctypes.CDLL(None).madvise
    call.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return call
