"""Clients a second of each simulator, and its memory: each engine runs in its own processes."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import timeit
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.common.machine import family, import_path, resident_bytes
from benchmarks.common.peers import make, peers
from benchmarks.simulate.models import MODELS
from benchmarks.simulate.tasks import Task, edgefl_arguments, edgefl_result
from edgefl.errors import ConfigError, EdgeflError
from edgefl.system.memory import cores
from edgefl.system.processes import last_line
from edgefl.system.structs import filled

_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""An engine has its own default."""
_LOOK_S = 0.05
_LAST = 400


class SimulateRow(msgspec.Struct, frozen=True, kw_only=True):
    """``clients_per_s``: clients that trained per second, from the end of the first round, in which an engine gets ready,
    to the end of the last of ``rounds``; ``seconds`` is that time. ``peak_rss_bytes``: the most that its processes had in
    memory at once, pages that they share counted for each. ``final_accuracy``: on the whole test set.
    ``limit_clients_per_s``: what the processor's arithmetic alone allows (:mod:`benchmarks.simulate.rows`)."""

    task: str
    engine: str
    clients: int
    per_round: int
    clients_per_s: float
    limit_clients_per_s: float
    peak_rss_bytes: int
    final_accuracy: float
    seconds: float
    rounds: int
    version: str


@dataclass(frozen=True)
class Engine:
    """``peer``: the environment that it runs in (:mod:`benchmarks.common.peers`), and ``module`` what runs it there; ""
    for ours. ``simulation``: the table of the federation file."""

    name: str
    module: str = ""
    peer: str = ""
    simulation: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)


def engines() -> dict[str, Engine]:
    """Return the engines by name: edgefl and pfl with many threads and with one, edgefl with workers, and Flower."""
    one = {"OMP_NUM_THREADS": "1"}
    found = [
        Engine("edgefl"),
        Engine("edgefl-1-thread", environment=one),
        Engine("edgefl-workers", simulation={"workers": cores()}, environment=one),
        Engine("pfl", module="pfl", peer="pfl"),
        Engine("pfl-1-thread", module="pfl", peer="pfl", environment=one),
        Engine("flower", module="flower", peer="flower-simulation"),
    ]
    return {each.name: each for each in found}


def chosen(names: list[str]) -> list[Engine]:
    """These engines, or all; ConfigError for one that there is not."""
    known = engines()
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(f"no engine {unknown[0]!r}; there are: {', '.join(known)}", engine=unknown[0])
    return [known[name] for name in names or known]


def measure(
    task: Task, engine: Engine, *, rounds: int = 0, say: Callable[[str], None] = lambda _: None
) -> SimulateRow:
    """One row. ``rounds``: in place of the task's own. EdgeflError where the engine cannot be installed or fails."""
    task = replace(task, rounds=rounds or task.rounds)
    if task.rounds < 2:
        raise ConfigError(f"--rounds begin at 2, as the first one is not counted; found {task.rounds}")
    python = make(peers()[engine.peer], say) if engine.peer else sys.executable
    with tempfile.TemporaryDirectory(prefix="edgefl-bench-") as name, import_path() as path:
        folder = Path(name)
        say(f"{task.name}: the data of {task.clients:,} clients")
        shape = task.write(folder, engine.simulation)
        say(f"{task.name}: {task.rounds} rounds of {engine.name}")
        inherited = {key: value for key, value in os.environ.items() if key not in _THREADS}
        environment = {**inherited, **engine.environment, **_quiet(engine, path)}
        module = ["-m", f"benchmarks.simulate.{engine.module}", name]
        arguments = module if engine.peer else edgefl_arguments(folder)
        told, peak = _run([python, *arguments], environment)
        if engine.peer:
            found: dict[str, Any] = json.loads(told[-1].text)
        else:
            found = edgefl_result(folder, [line.moment for line in told])
    return filled(
        SimulateRow,
        task,
        task=task.name,
        engine=engine.name,
        clients_per_s=round(task.per_round * found["rounds"] / found["seconds"], 2),
        limit_clients_per_s=round(limit(task, shape, rate()), 2),
        peak_rss_bytes=peak,
        final_accuracy=round(found["accuracy"], 4),
        seconds=round(found["seconds"], 6),
        rounds=found["rounds"],
        version=found["version"],
    )


def _quiet(engine: Engine, path: Path) -> dict[str, str]:
    """Return the variables with which a peer finds our packages and sends no telemetry."""
    quiet = {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"}
    return {"PYTHONPATH": str(path), **quiet} if engine.peer else {}


@dataclass(frozen=True)
class _Line:
    moment: float
    text: str


def _run(command: list[str], environment: dict[str, str]) -> tuple[list[_Line], int]:
    """The lines that the process wrote, and the peak of its memory; EdgeflError with its last words."""
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log,
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=log, text=True) as process,
    ):
        assert process.stdout is not None
        memory = _Memory(process.pid)
        try:
            told = [_Line(time.perf_counter(), line) for line in process.stdout if line.strip()]
            process.wait()
        except BaseException:
            process.terminate()
            raise
        finally:
            memory.stop()
        if process.returncode:
            log.seek(0)
            words = last_line(log.read(), f"exit code {process.returncode}")
            raise EdgeflError(f"{' '.join(command[1:4])} ended: {words[-_LAST:]}")
    return told, memory.peak


class _Memory:
    """The most bytes that a process and its children had in memory at once, looked at now and then."""

    def __init__(self, pid: int) -> None:
        self.peak = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, args=(pid,), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self, pid: int) -> None:
        while not self._over.wait(_LOOK_S):
            self.peak = max(self.peak, resident_bytes(family(pid)))


_SIDE = 2048
_TIMES = 8


def operations(model: nn.Module, x: torch.Tensor) -> int:
    """Multiplications and additions of the convolutions and matrix products of a step on ``x``, forward and backward."""
    counter = FlopCounterMode(display=False)
    with counter:
        model(x).sum().backward()
    return int(counter.get_total_flops())


@functools.cache
def rate() -> float:
    """The most operations a second at which torch multiplies float32 matrices on all cores, measured once."""
    before = torch.get_num_threads()
    torch.set_num_threads(cores())
    try:
        left, right = torch.randn(_SIDE, _SIDE), torch.randn(_SIDE, _SIDE)
        left @ right
        return 2 * _SIDE**3 / min(timeit.repeat(lambda: left @ right, number=1, repeat=_TIMES))
    finally:
        torch.set_num_threads(before)


def limit(task: Task, shape: tuple[int, ...], rate: float) -> float:
    """Clients a second that make the steps of ``task`` on samples of ``shape``, were there nothing but ``rate``."""
    return rate / (task.steps * operations(MODELS[task.model](), torch.zeros(task.batch, *shape)))
