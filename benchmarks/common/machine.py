"""Description of this machine, its processes, and workers that take turns on it."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import platform
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Protocol

import psutil

from benchmarks.common.worker import Worker, WorkerFailed
from edgefl.errors import EdgeflError
from edgefl.system.distribution import NAME
from edgefl.system.python import child_path, module_command
from edgefl.wire.mqtt.messages import VERSION

WARM_UP = 3
BLOCK_MS = 1500.0
"""A block is as many steps as fit in this time, at least two and at most ``BLOCK_MOST``."""
BLOCK_MOST = 20


class StepRunner(Protocol):
    """A process that runs steps: a :class:`Worker`, or a page in a browser."""

    def run(self, steps: int, *, count: bool = True) -> list[float]:
        """Return the milliseconds of each step, which the runner keeps if they ``count``."""


def worker_of(module: str, *arguments: object, threads: int) -> Worker:
    """Return the process that runs our ``module`` on so many threads; enter it to start."""
    command = module_command(module, *map(str, arguments))
    return Worker(command, own_environment(threads))


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
        for package in ("edgefl", "edgefl_device", "benchmarks"):
            os.symlink(_folder(package), Path(name) / package)
        yield Path(name)


def _folder(package: str) -> str:
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.submodule_search_locations is not None
    return spec.submodule_search_locations[0]


_PACKAGES = (NAME, "torch", "onnxruntime", "executorch", "numpy", "paho-mqtt", "amqtt", "flwr")


def machine() -> dict[str, object]:
    """Processor, memory, system and package versions. No names of hosts or people."""
    return {
        "processor": processor(),
        "cores": os.cpu_count() or 1,
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "protocol": VERSION,
        "packages": {name: number for name in _PACKAGES if (number := _version(name))},
    }


def processor() -> str:
    """Its model, as it names itself."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(line.partition(":")[2].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def quiet_environment(threads: int = 1) -> dict[str, str]:
    """Return the variables of measured processes: so many threads per library, 1 as `edgefl device` has it."""
    return {"OMP_NUM_THREADS": str(threads)}


def own_environment(threads: int = 1) -> dict[str, str]:
    """Return the variables of measured processes of this interpreter, which find the benchmarks too."""
    return {**quiet_environment(threads), "PYTHONPATH": child_path()}


def family(pid: int) -> list[psutil.Process]:
    """Return the process and all its descendants; nothing if it has ended."""
    try:
        first = psutil.Process(pid)
        return [first, *first.children(recursive=True)]
    except psutil.Error:
        return []


def cpu_seconds(processes: Iterable[psutil.Process]) -> float:
    """Return the processor seconds of those that still run, together."""
    total = 0.0
    for process in processes:
        with suppress(psutil.Error):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def resident_bytes(processes: Iterable[psutil.Process]) -> int:
    """Return the resident set sizes of those that still run, together."""
    total = 0
    for process in processes:
        with suppress(psutil.Error):
            total += process.memory_info().rss
    return total
