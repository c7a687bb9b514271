"""A full disk is waited for: what has to be written for the run to go on is tried until there is room."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from edgefl.wire.errors import StoreError

_Written = TypeVar("_Written")

_LONGEST_S = 10.0
_LOOK_S = 0.05


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
        pause_s = self._pause_s
        while True:
            try:
                return write()
            except StoreError as error:
                if self._ended:
                    raise
                self._troubled(error)
                self._wait(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_S)

    def end(self) -> None:
        """Wait for nothing any more; callable from a signal handler."""
        self._ended = True

    def _wait(self, seconds: float) -> None:
        began = time.monotonic()
        while not self._ended and time.monotonic() < began + max(seconds, _LOOK_S):
            time.sleep(_LOOK_S)
        self._waited += time.monotonic() - began
