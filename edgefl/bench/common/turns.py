"""Workers that take turns, so that whatever else the machine does hits all of them, and what those of others can import."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from edgefl.bench.common.machine import quiet_environment
from edgefl.bench.common.worker import Worker, WorkerFailed
from edgefl.wire.errors import EdgeflError

WARM_UP = 3
BLOCK_MS = 1500.0
"""A block is as many steps as fit in this time, at least two and at most ``BLOCK_MOST``."""
BLOCK_MOST = 20


class StepRunner(Protocol):
    """A process that runs steps: a :class:`Worker`, or a page in a browser."""

    def run(self, steps: int, *, count: bool = True) -> list[float]:
        """Return the milliseconds of each step, which the runner keeps if they ``count``."""
        ...


def worker_of(module: str, *arguments: object, threads: int) -> Worker:
    """Return the process that runs our ``module`` on so many threads; enter it to start."""
    command = [sys.executable, "-m", module, *map(str, arguments)]
    return Worker(command, quiet_environment(threads))


@contextlib.contextmanager
def running(workers: Iterable[Worker], what: str) -> Iterator[contextlib.ExitStack]:
    """Run ``workers`` inside the block. Raises EdgeflError if one of them ends by itself."""
    with contextlib.ExitStack() as stack:
        try:
            for worker in workers:
                stack.enter_context(worker)
            yield stack
        except WorkerFailed as error:
            raise EdgeflError(f"a process that measures {what} ended: {error}", log=error.log) from error


def take_turns(
    workers: Sequence[StepRunner], repeat: int, say: Callable[[str], None], warm_up: int = WARM_UP
) -> None:
    """Warm up, then run ``repeat`` blocks of equally many steps on each worker, by turns."""
    say("warming up")
    slowest = max(min(worker.run(warm_up, count=False)) for worker in workers)
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
