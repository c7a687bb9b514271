"""A measuring process that ends with whoever waits for its result, however that one ends: also by SIGKILL."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def sign_of_life() -> Iterator[int]:
    """Standard input for a process that is to end with this one: it never gets a byte."""
    read, write = os.pipe()
    try:
        yield read
    finally:
        os.close(write)
        os.close(read)


def end_with_parent() -> None:
    """End this process, whose standard input is a :func:`sign_of_life`, when its parent is gone."""
    threading.Thread(target=_watch, name="parent", daemon=True).start()


def _watch() -> None:
    while os.read(0, 1):
        pass
    os._exit(1)
