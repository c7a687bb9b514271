"""One process at a time in a folder: a lock that the kernel lets go when the process dies, however it dies."""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from pathlib import Path

from edgefl.system.files import private_opener

if sys.platform != "win32":
    import fcntl

_AGAIN_S = 0.1


class FolderHeld(Exception):
    """Another process holds the lock. ``pid``: its number, 0 where it could not write it down."""

    def __init__(self, path: Path, pid: int) -> None:
        super().__init__(f"{path} is held by process {pid or 'unknown'}")
        self.pid = pid

    @property
    def who(self) -> str:
        """``process 4711``, for a message; "another process" where its number is not known."""
        return f"process {self.pid}" if self.pid else "another process"


class FolderLock:
    """The lock ``folder/name``, held from here until :meth:`release` or the end of the process.

    The file stays: to remove it would let two processes in.

    Args:
        folder: where the lock lies.
        name: of its file.
        patience_s: seconds to wait for another holder, such as a process that is being stopped. A line on standard error
            names it.

    Raises:
        FolderHeld: another process holds the lock.
        OSError: the folder cannot be written.
    """

    def __init__(self, folder: Path, name: str = "lock", *, patience_s: float = 0.0) -> None:
        path = folder / name
        self._file = open(path, "a+b", opener=private_opener)  # noqa: SIM115 (held as long as the lock is)
        deadline = time.monotonic() + patience_s
        reported = False
        while not _taken(self._file.fileno()):
            held = FolderHeld(path, self._holder())
            if time.monotonic() >= deadline:
                self._file.close()
                raise held
            if not reported:
                print(
                    f"waiting up to {patience_s:g} s for {folder}: {held.who} has it",
                    file=sys.stderr,
                    flush=True,
                )
                reported = True
            time.sleep(_AGAIN_S)
        with suppress(OSError):  # on a full disk it stays without a number
            self._file.truncate(0)
            self._file.write(b"%d\n" % os.getpid())
            self._file.flush()

    def _holder(self) -> int:
        self._file.seek(0)
        digits = self._file.read(20).strip()
        return int(digits) if digits.isdigit() else 0

    def release(self) -> None:
        with suppress(OSError):  # what a full disk did not take
            self._file.close()


def _taken(descriptor: int) -> bool:
    """Return True if this process has the lock now. File systems without locks grant it always."""
    if sys.platform == "win32":
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True
