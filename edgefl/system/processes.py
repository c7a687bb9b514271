"""Child processes: command lines, termination, and processes that end with their parent.

A process ends with its parent, also after SIGKILL, in one of two ways, because no single way serves both cases.
:func:`end_by_signal` asks the kernel (Linux) for SIGTERM, which a server or a device answers by an orderly end. It
needs no thread and leaves standard input alone, but the kernel watches the *thread* that started the process. A
process that a short-lived thread starts, such as a measurement, therefore gets a :func:`sign_of_life` as its standard
input and calls :func:`end_with_input`, on any system.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from edgefl.system.search_path import user_folders

if TYPE_CHECKING:  # most devices start no process: they are to be small
    import socket
    import subprocess


def end_process(process: subprocess.Popen[Any], within_s: float = 10.0) -> None:
    """Terminate ``process``, and kill it if it still runs after ``within_s`` seconds."""
    from subprocess import TimeoutExpired

    process.terminate()
    try:
        process.wait(within_s)
    except TimeoutExpired:
        process.kill()
        process.wait()


@contextmanager
def child_process(
    command: Sequence[str], *, within_s: float = 10.0, **options: Any
) -> Iterator[subprocess.Popen[Any]]:
    """Run ``command`` during the ``with`` block, then end it with :func:`end_process` and close its pipes.

    Args:
        command: the program and its arguments.
        within_s: seconds that the process has to end before it is killed.
        options: options of :class:`subprocess.Popen`.
    """
    from subprocess import Popen

    process = Popen(command, **options)
    try:
        yield process
    finally:
        end_process(process, within_s)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


def last_line(text: str, otherwise: str) -> str:
    """Return the last line of ``text`` that is not blank, or ``otherwise`` if there is none."""
    lines = text.strip().splitlines()
    return lines[-1].strip() if lines else otherwise


PARENT = "EDGEFL_PARENT"
"""Environment variable with the pid of the process that supervises this one."""

_PR_SET_PDEATHSIG = 1


def end_by_signal() -> None:
    """Ask the kernel to send this process SIGTERM when its parent ends (Linux).

    Do nothing unless a supervisor started it. If the supervisor has ended already, exit.
    """
    parent = os.environ.get(PARENT)
    if not parent or sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(parent):  # it was gone before we asked
        sys.exit(1)


@contextmanager
def sign_of_life() -> Iterator[int]:
    """Open a context with the reading end of a pipe, which never delivers a byte and closes when this process ends.

    Pass it as standard input to a process that calls :func:`end_with_input`.
    """
    read, write = os.pipe()
    try:
        yield read
    finally:
        os.close(write)
        os.close(read)


def end_with_input() -> None:
    """Start a thread that ends this process when its standard input (:func:`sign_of_life`) is closed."""
    threading.Thread(target=_wait_for_end_of_input, name="parent", daemon=True).start()


def _wait_for_end_of_input() -> None:
    while os.read(0, 1):
        pass
    os._exit(1)


def module_command(module: str, *arguments: str) -> list[str]:
    """Return the command ``python -P -m module arguments``. The child imports nothing from its working folder."""
    return [sys.executable, "-P", "-m", module, *arguments]


def start_module(module: str, end: socket.socket) -> subprocess.Popen[bytes]:
    """Start ``python -m module`` in a process of a new session, so that Ctrl-C does not reach it.

    ``end``: socket that the process inherits; its descriptor is the only argument.
    """
    import subprocess

    return subprocess.Popen(
        module_command(module, str(end.fileno())),
        pass_fds=[end.fileno()],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": child_path()},
    )


def child_path() -> str:
    """Return a ``PYTHONPATH`` with which a child finds all modules of this process.

    Folders of scripts and notebooks come after the standard library and the installed packages, so that a user's
    ``random.py`` does not replace Python's.
    """
    last = user_folders()
    ways = [*(each for each in sys.path if each not in last), *last]
    there = (each for each in ways if each or last)  # the working folder may have been deleted
    return os.pathsep.join(dict.fromkeys(map(os.path.abspath, there)))


@contextmanager
def folder_last(folder: str) -> Iterator[None]:
    """Open a context with ``folder`` at the end of ``sys.path``, so that it hides no installed module."""
    sys.path.append(folder)
    try:
        yield
    finally:
        # From the end: another thread or the block may have added folders behind it.
        at = next((at for at in reversed(range(len(sys.path))) if sys.path[at] == folder), None)
        if at is not None:
            del sys.path[at]
