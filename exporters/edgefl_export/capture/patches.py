"""Temporary patches of a library, while one of our calls into it runs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import NamedTuple

_one_at_a_time = threading.RLock()


class Patch(NamedTuple):
    """Replacement of ``name`` in a module or class."""

    place: object
    name: str
    ours: object


@contextlib.contextmanager
def patched(*patches: Patch) -> Iterator[None]:
    """Apply the patches within the context, and restore the library after it, also after an error.

    Other threads that enter wait for its end, or one would put back what another had put there: without patches it is
    that lock alone. A thread that calls the library by itself meanwhile sees the patches, so that each has to compute
    what the library's own does. Where a library has moved a name, its patch is left out.
    """
    with _one_at_a_time, contextlib.ExitStack() as originals:
        for place, name, ours in patches:
            names = getattr(place, "__dict__", {})
            if name in names:
                originals.callback(setattr, place, name, names[name])
                setattr(place, name, ours)
        yield
