"""What the libraries below us work out again for each export, or for each node of it, worked out once.

Each change lasts as long as the call it is for. Where a library has moved what is changed here, the change is left
out: exports are slower then, nothing else.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import NamedTuple

_one_at_a_time = threading.RLock()


class Change(NamedTuple):
    """``name`` of a module or class, and what stands there instead of the library's own."""

    place: object
    name: str
    ours: object


@contextlib.contextmanager
def changed(*changes: Change) -> Iterator[None]:
    """The changes, for as long as the context; other threads wait for its end, or one would put back what another
    changed."""
    with _one_at_a_time, contextlib.ExitStack() as former:
        for place, name, ours in changes:
            held = getattr(place, "__dict__", {})
            if name in held:
                former.callback(setattr, place, name, held[name])
                setattr(place, name, ours)
        yield
