"""Room on the disk for what a round keeps there."""

from __future__ import annotations

import errno
import os
from typing import IO

_PIECE_BYTES = 1 << 20


def reserve(file: IO[bytes], size: int) -> None:
    """Give ``file`` its ``size`` bytes on disk now: a disk that is full later would end the round."""
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(file.fileno(), 0, size)
            return
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):  # a file system that cannot
                raise
    for start in range(0, size, _PIECE_BYTES):
        file.write(bytes(min(_PIECE_BYTES, size - start)))
    file.flush()
    os.fsync(file.fileno())
