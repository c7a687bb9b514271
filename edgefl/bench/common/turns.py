"""Workers that take turns, so that whatever else the machine does hits all of them, and what those of others can import."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from edgefl.bench.common.worker import Worker

WARM_UP = 3
BLOCK_MS = 1500.0
"""A block is as many steps as fit in this time, at least two and at most ``BLOCK_MOST``."""
BLOCK_MOST = 20


def take_turns(workers: Sequence[Worker], repeat: int, say: Callable[[str], None]) -> None:
    """Warm up, then ``repeat`` blocks of equally many steps for each worker, by turns."""
    say("warming up")
    slowest = max(min(worker.run(WARM_UP, count=False)) for worker in workers)
    steps = int(min(BLOCK_MOST, max(2, BLOCK_MS / slowest)))
    for block in range(1, repeat + 1):
        say(f"block {block} of {repeat}, {steps} steps each")
        for worker in workers:
            worker.run(steps)


@contextlib.contextmanager
def import_path() -> Iterator[Path]:
    """A folder in which another environment finds our packages, and none of the packages installed beside them."""
    with tempfile.TemporaryDirectory(prefix="edgefl-path-") as name:
        for package in ("edgefl", "device_runtime"):
            os.symlink(_folder(package), Path(name) / package)
        yield Path(name)


def _folder(package: str) -> str:
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.submodule_search_locations is not None
    return spec.submodule_search_locations[0]
