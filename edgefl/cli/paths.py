"""Paths on a command line, checked before torch is loaded for what they are for."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from tempfile import TemporaryFile

from edgefl.errors import ConfigError, DataError


def existing(path: Path | None) -> Path | None:
    """Return ``path``; DataError with the most similar name in its folder if there is nothing."""
    if path is not None and not path.exists():
        from edgefl.wire.text import similar

        raise DataError(f"there is no file or folder {path}{similar(path)}; correct the path", path=str(path))
    return path


def run_folder(path: Path) -> Path:
    """Return ``path``; DataError or ConfigError unless it is the folder of a run or a simulation."""
    existing(path)
    if not any((path / name).is_file() for name in ("run.toml", "config.toml")):
        raise ConfigError(
            f"{path} is not the folder of a run: it has no run.toml; give the --out of `edgefl run` or `edgefl simulate`",
            path=str(path),
        )
    return path


def writable_file(path: Path | None) -> Path | None:
    """Return ``path``; OSError unless a file can be written there.

    Devices such as /dev/stdout are written to themselves, and so are files that exist: their folder does not matter.
    """
    if path is not None:
        if path.is_dir():
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not path.exists():
            _check_writable(path, path.absolute().parent)
        elif not os.access(path, os.W_OK):
            raise OSError(errno.EACCES, os.strerror(errno.EACCES), str(path))
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
