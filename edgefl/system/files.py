"""Files that are replaced in one step: whoever opens the path finds the old content or the new, never a part of it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

PARTIAL = ".partial"
"""How the name of a file ends that is not whole yet."""


@contextmanager
def replacing(path: Path, *, durable: bool = False, shared: bool = False) -> Iterator[BinaryIO]:
    """A file beside ``path`` to write to, which takes its place where the block ends without an error.

    ``durable``: its bytes are on disk before it does. ``shared``: several processes may write the same path at once; the
    last one stays. The folder must exist; OSError if the file cannot be written.
    """
    own = f".{os.getpid()}-{threading.get_ident()}" if shared else ""
    partial = path.with_name(path.name + own + PARTIAL)
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


def write_whole(path: Path, data: bytes, *, durable: bool = False, shared: bool = False) -> None:
    """Replace the content of ``path`` by ``data``, whole or not at all; see :func:`replacing`."""
    with replacing(path, durable=durable, shared=shared) as file:
        file.write(data)
