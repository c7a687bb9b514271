"""What is made once for all tests of a session, whichever of its processes asks first."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def made_once(factory: pytest.TempPathFactory, name: str) -> Iterator[Path]:
    """A folder that all processes of the session share; only one of them at a time is inside."""
    root = factory.getbasetemp()
    folder = (root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / "shared" / name
    folder.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder
