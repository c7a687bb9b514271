"""How a process that runs graphs is started: out of the folder of the agent, and without its variables."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import IO

from edgefl import wire
from edgefl.wire.text import printable

_KEPT = (
    "PATH",
    "PYTHONHOME",
    "LD_LIBRARY_PATH",
    "XDG_CACHE_HOME",
    "HOME",
    "LANG",
    "LC_ALL",
    "SYSTEMROOT",
)
_MOST_WORDS = 300
_MOST_BYTES = 8192
_END_S = 1.0


def command(module: str, *arguments: str) -> list[str]:
    """``python -m module arguments``, but nothing is imported from the folder that it is started in (``-P``): a graph may
    have written there. Our packages are found as here, also where only this process knows the way to them."""
    ways = [str(Path(os.path.abspath(str(file))).parents[2]) for file in (__file__, wire.__file__)]
    begin = (
        f"import runpy, sys; sys.path[:0] = [each for each in {list(dict.fromkeys(ways))!r} if each not in sys.path]; "
        f"runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    )
    return [sys.executable, "-P", "-c", begin, *arguments]


def environment() -> dict[str, str]:
    """No variable of the agent's, among which may be a password, but those that Python and libraries are found by. What they
    say of the agent's folder is said of that folder still."""
    kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
    ways = os.environ.get("PYTHONPATH", "")
    if ways:
        kept["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, ways.split(os.pathsep)))
    return kept | {"PYTHONDONTWRITEBYTECODE": "1"}


class Complaints:
    """The end of what a process says on its standard error. A thread reads it: the process waits for nobody."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._end = b""
        self._thread = threading.Thread(target=self._read, name="complaints", daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with suppress(OSError, ValueError):  # closed
            while piece := os.read(self._stream.fileno(), 4096):
                self._end = (self._end + piece)[-_MOST_BYTES:]

    def last(self) -> str:
        """Of a process that ended: its last words in one line; "" if it said nothing."""
        words = " ".join(self.lines())
        return printable(words[-_MOST_WORDS:])

    def lines(self) -> list[str]:
        """Of a process that ended: its last lines."""
        self._thread.join(_END_S)
        return [line.strip() for line in self._end.decode(errors="replace").strip().splitlines()]

    def close(self) -> None:
        self._thread.join(_END_S)
        if not self._thread.is_alive():  # else a process below it has the other end
            self._stream.close()
