"""Files that are replaced in one step: whoever opens the path finds the old content or the new, never a part of it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def replacing(path: Path, *, durable: bool = False) -> Iterator[BinaryIO]:
    """A file beside ``path`` to write to, which takes its place where the block ends without an error.

    ``durable``: its bytes are on disk before it does. The folder must exist; OSError if the file cannot be written.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as file:
            yield file
            if durable:
                file.flush()
                os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def write_whole(path: Path, data: bytes, *, durable: bool = False) -> None:
    """Replace the content of ``path`` by ``data``, whole or not at all; see :func:`replacing`."""
    with replacing(path, durable=durable) as file:
        file.write(data)
