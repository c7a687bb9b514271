"""Python child processes, and imports from the user's folder, that no file of the same name as a library can break."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from edgefl.system.search_path import user_folders


def module_command(module: str, *arguments: str) -> list[str]:
    """Return the command ``python -P -m module arguments``. The child imports nothing from its working folder."""
    return [sys.executable, "-P", "-m", module, *arguments]


def start_module(module: str, end: socket.socket) -> subprocess.Popen[bytes]:
    """Start ``module`` with the descriptor of ``end`` as its argument. Ctrl-C does not reach its session."""
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
    """Keep ``folder`` at the end of ``sys.path`` while the block runs, so that it hides no installed module."""
    sys.path.append(folder)
    try:
        yield
    finally:
        # From the end: another thread or the block may have added folders behind it.
        at = next((at for at in reversed(range(len(sys.path))) if sys.path[at] == folder), None)
        if at is not None:
            del sys.path[at]
