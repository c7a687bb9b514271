"""Atomic replacement of files, and locks of folders."""

from __future__ import annotations

import errno
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, BinaryIO

_RESERVED_BYTES = 1 << 20
PARTIAL = ".partial"
"""How the name of a file ends that is not whole yet."""
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_OF_DISKS = {*_NO_ROOM, errno.EROFS, errno.EIO}
_OF_RIGHTS = {errno.EACCES, errno.EPERM, errno.EROFS}


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Open a context that adds ``path`` to errors of full or read-only disks. A write to an open file fails without a
    name.

    Raises:
        OSError: the error with the name of the file.
    """
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno not in _OF_DISKS:
            raise
        raise OSError(error.errno, os.strerror(error.errno), str(path)) from error


def remedy(error: OSError) -> str:
    """Return advice for the user about an error of the file system, or "" if there is none."""
    if error.errno in _NO_ROOM:
        return "free some space there, or name another folder"
    if error.errno == errno.ENOENT:
        return "correct the path"
    return "look at its owner and permissions, or name another place" if error.errno in _OF_RIGHTS else ""


@contextmanager
def replacing(
    path: Path, *, durable: bool = False, shared: bool = False, private: bool = False
) -> Iterator[BinaryIO]:
    """Open a temporary binary file in the folder of ``path``, as a context, and rename it to ``path`` at the end.

    If the ``with`` block raises an error, the temporary file is deleted and ``path`` stays as it was.

    Args:
        path: The file to replace; its folder must exist.
        durable: True to wait until the bytes and the new name are on disk.
        shared: True if several processes may write the same path at the same time; the last one wins.
        private: True if only the owner may read the file.

    Raises:
        OSError: If writing fails; it names the file.
    """
    own = f".{os.getpid()}-{threading.get_ident()}" if shared else ""
    partial = path.with_name(path.name + own + PARTIAL)
    try:
        with naming(path):
            with open(partial, "wb", opener=private_opener if private else None) as file:
                yield file
                if durable:
                    file.flush()
                    os.fsync(file.fileno())
            partial.replace(path)
            if durable:
                sync_folder(path.parent)
    except BaseException as error:
        if isinstance(error, OSError) and error.filename == str(partial):
            error.filename = str(path)
        partial.unlink(missing_ok=True)
        raise


def sync_folder(folder: Path) -> None:
    """Wait until the names in ``folder`` are on disk. Does nothing on systems without such a call.

    Otherwise a new or renamed file may be missing after a power failure, even if its bytes were synchronized.
    """
    if sys.platform == "win32":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def private_opener(path: str, flags: int) -> int:
    """Open a file and return its descriptor; pass this function as ``opener`` of :func:`open`. Only the owner may read a
    new file.
    """
    return os.open(path, flags, 0o600)


def make_private(path: Path) -> None:
    """Create an empty file that only its owner may read, unless the file exists. Call it before a database creates the
    file for everyone.
    """
    with suppress(FileExistsError):
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))


def make_folder(folder: Path, *, private: bool = False) -> None:
    """Create ``folder`` and its parents if they are missing, and wait until they are on disk.

    ``private``: True if only the owner may access a new ``folder``.
    """
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(mode=0o700 if private else 0o777, parents=True, exist_ok=True)  # those above: 0o777
    for made in missing:
        sync_folder(made.parent)


def write_whole(
    path: Path, data: bytes, *, durable: bool = False, shared: bool = False, private: bool = False
) -> None:
    """Replace the content of ``path`` by ``data`` atomically.

    Args:
        path: The file to replace; its folder must exist.
        data: The new content.
        durable: True to wait until the bytes and the new name are on disk.
        shared: True if several processes may write the same path at the same time; the last one wins.
        private: True if only the owner may read the file.

    Raises:
        OSError: If writing fails; it names the file.
    """
    with replacing(path, durable=durable, shared=shared, private=private) as file:
        file.write(data)


def write_text(path: Path, text: str) -> None:
    """Replace the content of ``path`` by ``text`` in UTF-8 atomically. Missing folders are created."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, text.encode())


def reserve_room(file: IO[bytes], size: int) -> None:
    """Allocate ``size`` bytes on disk for ``file`` now, because a disk that is full later would end the round."""
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(file.fileno(), 0, size)
            return
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):  # a file system that cannot
                raise
    for start in range(0, size, _RESERVED_BYTES):
        file.write(bytes(min(_RESERVED_BYTES, size - start)))
    file.flush()
    os.fsync(file.fileno())


_AGAIN_S = 0.1


class FolderHeld(Exception):
    """Error: another process holds the lock of a folder. ``pid`` is its process id, 0 if unknown."""

    def __init__(self, path: Path, pid: int) -> None:
        super().__init__(f"{path} is held by process {pid or 'unknown'}")
        self.pid = pid

    @property
    def who(self) -> str:
        """Holder of the lock for a message: ``process 4711``, or "another process" if its id is unknown."""
        return f"process {self.pid}" if self.pid else "another process"


class FolderLock:
    """Lock on the file ``folder/name``, held from construction until :meth:`release` or the end of the process.

    The file is never removed, because a removal would allow two processes to hold the lock.

    Args:
        folder: folder of the lock.
        name: name of its file.
        patience_s: seconds to wait for another holder, such as a process that is being stopped. A line on
            standard error names it.

    Raises:
        FolderHeld: if another process holds the lock.
        OSError: if the folder cannot be written.
    """

    def __init__(self, folder: Path, name: str = "lock", *, patience_s: float = 0.0) -> None:
        path = folder / name
        self._file = open(path, "a+b", opener=private_opener)  # noqa: SIM115 (held as long as the lock is)
        deadline = time.monotonic() + patience_s
        reported = False
        while not _try_lock(self._file.fileno()):
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


def _try_lock(descriptor: int) -> bool:
    """Try to lock an open file without waiting. Return False if another process holds the lock.

    File systems without locks always succeed.
    """
    if sys.platform == "win32":
        return True
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True
