"""Search for calls that read or write state outside of Python: files, clocks, queues, and objects in C."""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, ModuleType
from typing import Any

# Functions of these modules read what lies outside of the process.
_OUTSIDE = frozenset(
    {"_io", "_multiprocessing", "_posixsubprocess", "_socket", "_winapi", "io", "nt", "posix", "select", "time"}
)  # fmt: skip
_PURE = ("fspath", "text_encoding")
# Objects of these libraries keep their state in attributes that belong to threads.
_THREADS = frozenset({"asyncio", "concurrent", "multiprocessing", "queue", "threading"})
# Objects of these libraries never change, are read as Python state, or change nothing that is computed.
_READ = frozenset(
    {
        "_abc", "_contextvars", "_ctypes", "_operator", "_random", "_thread", "_weakref", "abc", "builtins", "collections",
        "ctypes", "datetime", "decimal", "functools", "itertools", "mmap", "numpy", "operator", "random", "re", "torch",
        "types", "typing", "weakref",
    }
)  # fmt: skip
# What these libraries call decides nothing that the code of a model computes.
_CALLERS = frozenset(
    {
        "_frozen_importlib", "_frozen_importlib_external", "contextlib", "edgefl", "edgefl_export", "importlib", "linecache",
        "logging", "multiprocessing", "threading", "torch", "traceback", "warnings",
    }
)  # fmt: skip


@contextmanager
def noting_outside(found: list[str]) -> Iterator[None]:
    """Open a context that appends to ``found`` the names of functions that use state outside of Python.

    Such state is a file, a clock, a queue or an object in C. Only calls of this thread count. If another profiler is
    running, nothing is recorded.
    """
    if sys.getprofile() is not None:
        yield
        return

    def note(frame: FrameType, event: str, called: Any) -> None:
        name = ""
        if event == "call":
            caller = frame.f_back
            if _root(frame.f_globals.get("__name__")) in _THREADS and caller is not None:
                name, frame = frame.f_code.co_qualname, caller
        elif event == "c_call" and _is_outside(called):
            name = called.__qualname__
        if name and name not in found and _root(frame.f_globals.get("__name__")) not in _CALLERS:
            found.append(name)

    # Callbacks of the garbage collector, which other libraries register, run inside of any call and are not the module's.
    collects = gc.isenabled()
    gc.disable()
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)
        if collects:
            gc.enable()


def _is_outside(called: Any) -> bool:
    holder = getattr(called, "__self__", None)
    if holder is None or isinstance(holder, ModuleType | type):
        return _root(getattr(called, "__module__", None)) in _OUTSIDE and called.__name__ not in _PURE
    return _is_unread(type(holder))  # type: ignore[arg-type]  # a type has a hash


@functools.cache
def _is_unread(kind: type) -> bool:
    """Return True for classes implemented in C whose objects hold state that Python code cannot read."""
    return (
        not any(_root(each.__module__) in _READ for each in kind.__mro__[:-1])
        if kind is not object
        else False
    )


@functools.cache
def _root(name: str | None) -> str:
    return (name or "").partition(".")[0]
