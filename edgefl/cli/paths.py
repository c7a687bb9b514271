"""Paths on a command line, checked before torch is loaded for what they are for."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from tempfile import TemporaryFile

from edgefl.wire.errors import DataError


def existing(path: Path | None) -> Path | None:
    """Return ``path``; DataError with the most similar name in its folder if there is nothing."""
    if path is not None and not path.exists():
        from edgefl.config.nearest import similar

        raise DataError(f"there is no file or folder {path}{similar(path)}; correct the path", path=str(path))
    return path


def writable_file(path: Path | None) -> Path | None:
    """Return ``path``; OSError unless a file can be written there."""
    if path is not None:
        if path.is_dir():
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        _check_writable(path, path.absolute().parent)
    return path


def writable_folder(path: Path | None) -> Path | None:
    """Return ``path``; OSError unless it is a folder that can be written to, or can be made."""
    if path is not None:
        _check_writable(path, path.absolute())
    return path


def _check_writable(path: Path, folder: Path) -> None:
    there = next(each for each in (folder, *folder.parents) if each.exists())
    try:
        with TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise OSError(error.errno, os.strerror(error.errno or 0), str(path)) from error
