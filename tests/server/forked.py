"""Processes of a server, forked from one that has imported what they need: tests start, and kill, dozens of them."""

from __future__ import annotations

import multiprocessing
import os
import socket
import subprocess
from multiprocessing.connection import Connection

from edgefl_server.workers import process
from edgefl_server.workers.process import ProcessLauncher, WorkerProcess

FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(["tests.server.killed.kill_me", "tests.server.shards.loaded"])


class _Worker:
    """A worker's process, like :class:`subprocess.Popen`."""

    def __init__(self, there: socket.socket) -> None:
        with Connection(os.dup(there.fileno())) as end:
            self._process = FORKED.Process(target=_work, args=(end,))
            self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("worker", timeout or 0.0)
        return self._process.exitcode


def _work(there: Connection) -> None:
    process.serve(os.dup(there.fileno()))


class ForkedLauncher(ProcessLauncher):
    """The product's launcher, but for how its processes begin."""

    def start(self, there: socket.socket) -> WorkerProcess:
        return _Worker(there)
