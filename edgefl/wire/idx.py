"""The idx file format of the MNIST family, read by the device's data loader and by the server's datasets."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

import numpy as np

from edgefl.wire.errors import DataError
from edgefl.wire.tensors import Array

_TYPES: dict[int, str] = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


def read_idx(path: Path) -> Array:
    """The array of an idx file, gzipped or not, in native byte order; DataError if it is none or is cut short."""
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {error}; fetch it again", path=str(path)) from error
    if len(data) < 4 or data[:2] != b"\0\0" or data[2] not in _TYPES:
        raise DataError(f"{path} is not an idx file (magic {data[:4].hex()})", path=str(path))
    stored, header = np.dtype(_TYPES[data[2]]), 4 + 4 * data[3]
    shape = tuple(np.frombuffer(data[4:header], ">u4").tolist())
    if len(shape) != data[3] or len(data) != header + stored.itemsize * int(np.prod(shape, dtype=np.int64)):
        raise DataError(
            f"{path} announces shape {shape} and holds {len(data) - header} bytes; fetch it again",
            path=str(path),
        )
    array = np.frombuffer(data, stored, offset=header).reshape(shape)
    return array.astype(stored.newbyteorder("="), copy=False)
