"""A full disk is waited for: what has to be written for the run to go on is tried until there is room."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol, TypeVar

from edgefl.errors import StoreError

_Written = TypeVar("_Written")

_LONGEST_S = 10.0
_LOOK_S = 0.05


class Persist(Protocol):
    """Does what needs the disk or the database, and does it again until it succeeds."""

    def __call__(self, write: Callable[[], _Written]) -> _Written: ...


def once(write: Callable[[], _Written]) -> _Written:
    """Without a second try."""
    return write()


class CannotGoOn(StoreError):
    """What was decided could not be carried out, for want of the disk or the database."""


class Patience:
    """``troubled`` is told each failure; the pauses between tries begin with ``pause_s`` and are doubled."""

    def __init__(self, pause_s: float, troubled: Callable[[StoreError], None]) -> None:
        self._pause_s = pause_s
        self._troubled = troubled
        self._ended = False
        self._waited = 0.0

    def take_waited(self) -> float:
        """Seconds that were waited since this was last asked."""
        waited, self._waited = self._waited, 0.0
        return waited

    def persist(self, write: Callable[[], _Written]) -> _Written:
        """What ``write`` returns, once it succeeds; its StoreError after :meth:`end`."""
        began, pause_s = time.monotonic(), self._pause_s
        waited = False
        while True:
            try:
                written = write()
            except StoreError as error:
                if self._ended:
                    raise
                self._troubled(error)
                self._wait(pause_s)
                pause_s, waited = min(2 * pause_s, _LONGEST_S), True
                continue
            if waited:  # a database that is away may take long to say so
                self._waited += time.monotonic() - began
            return written

    def end(self) -> None:
        """Wait for nothing any more; callable from a signal handler."""
        self._ended = True

    def _wait(self, seconds: float) -> None:
        until = time.monotonic() + max(seconds, _LOOK_S)
        while not self._ended and time.monotonic() < until:
            time.sleep(_LOOK_S)
