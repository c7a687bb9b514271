"""What others' packages have, in a form of ours for a while: functions that people import by name, and generators.

A :class:`Swap` counts who is inside, so that threads may be there beside each other; what it puts there asks
whether it runs for a thread that is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

Place = tuple[Any, str, Any]
"""An object, the name of its attribute, and what stands there meanwhile."""


class Swap:
    """Puts something of ours at ``places`` for as long as anybody is inside."""

    def __init__(self, *places: Place) -> None:
        self._ours = places
        self._own = [(room, name, vars(room).get(name, getattr(room, name))) for room, name, _ in places]
        self._here: ContextVar[bool] = ContextVar("here", default=False)
        self._lock = threading.Lock()
        self._inside = 0

    def here(self) -> bool:
        """Whether this thread is inside."""
        return self._here.get()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        token = self._here.set(True)
        self._count(1)
        try:
            yield
        finally:
            self._count(-1)
            self._here.reset(token)

    def _count(self, by: int) -> None:
        with self._lock:
            before, self._inside = self._inside, self._inside + by
            if bool(before) is bool(self._inside):
                return
            for room, name, value in self._own if before else self._ours:
                setattr(room, name, value)


def heeding(
    swap: Callable[[], Swap], original: Callable[..., Any], ours: Callable[..., Any]
) -> Callable[..., Any]:
    """``ours`` for threads inside of ``swap``, ``original`` for others."""

    def called(*args: Any, **kwargs: Any) -> Any:
        return (ours if swap().here() else original)(*args, **kwargs)

    return called
