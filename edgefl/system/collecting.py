"""Python's search for garbage in cycles, put off while something large is built."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def collecting_later() -> Iterator[None]:
    """No search meanwhile: what grows and stays would be walked through again and again.

    Memory that only cycles hold is free afterwards. Of the process: threads that run meanwhile are searched later too.
    """
    searching = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if searching:
            gc.enable()


@contextlib.contextmanager
def built_to_stay() -> Iterator[None]:
    """:func:`collecting_later` for what is there until the process ends: it is not walked through afterwards either, nor by
    the processes that are forked from this one."""
    with collecting_later():
        yield
        gc.freeze()
