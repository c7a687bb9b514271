"""Handle of one torch process. It imports few modules, so that the process can be started first."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING

from edgefl.errors import not_on_windows
from edgefl.system.processes import child_path, sign_of_life

if TYPE_CHECKING:
    from edgefl_server.torch_process.connection import PickleConnection

INSIDE = "edgefl_server.torch_process.inside"
"""Module that the process runs; part of its command line."""
_END_S = 5.0


def _refuse_windows() -> None:
    if sys.platform == "win32":
        raise not_on_windows("a server")


class Process:
    """Handle of a torch process, which is started by the constructor and ends when this process ends.

    Its two connections answer requests at the same time. The process loads torch after its start.

    Raises:
        ConfigError: on Windows.

    Attributes:
        composed: True if the process has composed the run.
        broken: True if a request was interrupted, so that the next message may answer an earlier request.
        locks: Lock of each connection, which its user holds.
        connections: The connections; the second one is for requests that must not wait.
    """

    def __init__(self) -> None:
        _refuse_windows()
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
        from edgefl_server.torch_process.connection import PickleConnection

        self.connections: tuple[PickleConnection, ...] = tuple(
            PickleConnection(here, self._process) for here, _ in pairs
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def end(self) -> str:
        """End the process, and return a description of its end, such as ``exit code 0``. After five seconds it is
        killed.

        Do not call it while holding one of its locks. Later calls return the same description.
        """
        with self._ending:
            if not self._ended:
                self._ended = self._end()
        return self._ended

    def _end(self) -> str:
        self._process.poll()
        self._alive.close()
        for lock, connection in zip(self.locks, self.connections, strict=True):
            connection.hang_up()  # a thread that waits for an answer releases its lock
            with lock:
                connection.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        return _exit_text(self._process.returncode)


def _exit_text(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def _command(*sockets: int) -> list[str]:
    """Return the command of the process. ``sockets`` are the file descriptors of its connections.

    It gets the import path of this process, so that the working directory adds no modules.
    """
    ways = child_path().split(os.pathsep)
    begin = f"import sys; sys.path[:] = {ways!r}; from {INSIDE} import main; main{sockets!r}"
    return [sys.executable, "-P", "-c", begin]
