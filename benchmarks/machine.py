"""This machine: its description, its processes, and the variables of measured ones."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import platform
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

from edgefl.system.distribution import NAME
from edgefl.system.processes import child_path
from edgefl.wire.mqtt.messages import VERSION


@contextlib.contextmanager
def import_path() -> Iterator[Path]:
    """Yield a folder with our packages alone, for the import path of another environment."""
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
    """Return processor, memory, system and package versions. No names of hosts or people."""
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
    """Return the processor's model, as it names itself."""
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
    """Return the variables of measured processes: so many threads per library; `edgefl device` has 1."""
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
