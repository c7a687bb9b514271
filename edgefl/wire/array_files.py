"""Files of arrays, read by the device's data loader and by the server's datasets: npz, and idx of the MNIST family."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path
from zipfile import is_zipfile

import numpy as np

from edgefl.errors import DataError
from edgefl.wire.tensors import Array

_TYPES: dict[int, str] = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


def read_npz(path: Path, remedy: str) -> dict[str, Array]:
    """Return the arrays of an npz file by name, in native byte order.

    Args:
        path: Path of the file.
        remedy: Advice for the user if the file is missing or is no npz archive, appended to the error text.

    Raises:
        DataError: The file is missing, is no npz archive, is damaged, or contains an array of Python objects.
    """
    arrays: dict[str, Array] = {}
    name = ""
    try:
        if not is_zipfile(path):
            path.open("rb").close()
            raise DataError(f"{path} is no .npz archive; {remedy}", path=str(path), expected=".npz")
        with np.load(path, allow_pickle=False) as archive:
            for name in archive.files:
                arrays[name] = to_native_order(archive[name])
    except FileNotFoundError as error:
        raise DataError(f"there is no file {path}; {remedy}", path=str(path)) from error
    except DataError:
        raise
    except Exception as error:  # numpy, zipfile and zlib raise unrelated types for damaged files
        raise DataError(
            f"{path} cannot be read: {read_error_text(error, name)}", path=str(path), error=str(error)
        ) from error
    return arrays


def to_native_order(array: Array) -> Array:
    """Return ``array`` in native byte order: ``array`` itself if it already is, else a converted copy."""
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def read_error_text(error: Exception, name: str) -> str:
    """Return the error text for an exception that numpy raised while it read an npz or npy file.

    Args:
        error: Exception that numpy raised.
        name: Name of the array that was being read, or "" if it is unknown.
    """
    if isinstance(error, ValueError) and ("allow_pickle" in str(error) or "Python objects" in str(error)):
        what = f"array {name!r}" if name else "it"
        return f"{what} holds Python objects; write it as numbers, all rows of one length"
    return str(error)


def read_idx(path: Path) -> Array:
    """Return the array of an idx file (the format of MNIST) in native byte order.

    Args:
        path: Path of the file. It is decompressed first if it ends in ``.gz``.

    Raises:
        DataError: The file cannot be read, is no idx file, or its size contradicts its header.
    """
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(
            f"{path} cannot be read: {error}; fetch it again", path=str(path), error=str(error)
        ) from error
    if len(data) < 4 or data[:2] != b"\0\0" or data[2] not in _TYPES:
        raise DataError(
            f"{path} is not an idx file (magic {data[:4].hex()})", path=str(path), magic=data[:4].hex()
        )
    stored, header = np.dtype(_TYPES[data[2]]), 4 + 4 * data[3]
    shape = tuple(np.frombuffer(data[4:header], ">u4").tolist())
    if len(shape) != data[3] or len(data) != header + stored.itemsize * int(np.prod(shape, dtype=np.int64)):
        raise DataError(
            f"{path} announces shape {shape} and holds {len(data) - header} bytes; fetch it again",
            path=str(path),
            shape=shape,
        )
    array = np.frombuffer(data, stored, offset=header).reshape(shape)
    return array.astype(stored.newbyteorder("="), copy=False)
