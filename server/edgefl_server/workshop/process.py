"""One process of a workshop, as its server has it. Imports next to nothing, so that it may start before all else."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING

from edgefl.system.parent import sign_of_life
from edgefl.system.python import child_path

if TYPE_CHECKING:
    from edgefl_server.workshop.line import Line

INSIDE = "edgefl_server.workshop.inside"
"""The module that it runs: its command names it."""
_END_S = 5.0


class Process:
    """A process that has begun to load torch. It has two lines: words are answered ``beside`` each other on the second.

    It ends with this one, however that ends. ``composed``: it has the run's models; ``broken``: what comes from it is no
    answer to what it is asked next.
    """

    def __init__(self) -> None:
        self.composed, self.broken = False, False
        self.locks = threading.Lock(), threading.Lock()
        self._ending, self._ended = threading.Lock(), ""
        with ExitStack() as began:
            alive = began.enter_context(sign_of_life())
            pairs = [socket.socketpair() for _ in self.locks]
            theirs = [there.fileno() for _, there in pairs]
            self._process = subprocess.Popen(
                _command(*theirs), stdin=alive, pass_fds=theirs, start_new_session=True
            )
            for _, there in pairs:
                there.close()
            self._alive = began.pop_all()
        from edgefl_server.workshop.line import Line

        self.lines: tuple[Line, ...] = tuple(Line(here, self._runs) for here, _ in pairs)

    @property
    def pid(self) -> int:
        return self._process.pid

    def _runs(self) -> bool:
        return self._process.poll() is None

    def end(self) -> str:
        """End it; how it ended, in words. By no thread that holds one of its locks."""
        with self._ending:
            if not self._ended:
                self._ended = self._end()
        return self._ended

    def _end(self) -> str:
        self._process.poll()
        self._alive.close()
        for lock, line in zip(self.locks, self.lines, strict=True):
            line.hang_up()  # whoever waits for an answer gives its lock free
            with lock:
                line.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        return _how(self._process.returncode)


def _how(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def _command(*lines: int) -> list[str]:
    """It imports what this process would, and nothing from a folder that it happens to be started in."""
    ways = child_path().split(os.pathsep)
    begin = f"import sys; sys.path[:] = {ways!r}; from {INSIDE} import main; main{lines!r}"
    return [sys.executable, "-P", "-c", begin]
