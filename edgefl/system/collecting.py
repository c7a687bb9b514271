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
    """Keep the garbage collector away from objects that live as long as the process.

    It does not run in the block (:func:`collecting_later`), and scans the objects at no time later, nor in forked processes.
    """
    with collecting_later():
        yield
        gc.freeze()
