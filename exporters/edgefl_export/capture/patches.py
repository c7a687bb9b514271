"""Temporary patches of a library, while one of our calls into it runs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import NamedTuple

_one_at_a_time = threading.RLock()


class Patch(NamedTuple):
    """Replacement ``ours`` for the attribute ``name`` of ``place``, a module or class."""

    place: object
    name: str
    ours: object


@contextlib.contextmanager
def patched(*patches: Patch) -> Iterator[None]:
    """Apply ``patches`` while the ``with`` block runs and restore the library afterwards, also after an error.

    Only one thread at a time can be in such a block, because two could restore each other's patches; without patches the
    block is this lock alone. Threads that call the library outside of such a block see the patches, so each patch must
    return what the original does. A patch is ignored if its place has no attribute of that name.
    """
    with _one_at_a_time, contextlib.ExitStack() as originals:
        for place, name, ours in patches:
            names = getattr(place, "__dict__", {})
            if name in names:
                originals.callback(setattr, place, name, names[name])
                setattr(place, name, ours)
        yield
