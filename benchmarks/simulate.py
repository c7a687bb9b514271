"""``python -m benchmarks simulate``: clients per second and memory of simulators on the same tasks."""

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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import torch
import typer
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.machine import family, import_path, resident_bytes
from benchmarks.options import Json
from benchmarks.peers import make, peers
from benchmarks.results import measured, mebibytes, report
from benchmarks.workers.simulation import MODELS, JobFolder, SimulationJob, run_result
from edgefl.config import Federation, load, parse
from edgefl.config.text import dump
from edgefl.data import datasets
from edgefl.data.dataset import Array, Dataset
from edgefl.errors import ConfigError, EdgeflError
from edgefl.setup.data import open_data, partition
from edgefl.setup.tiers import completed, device_names
from edgefl.simulator.folder import MODEL_NAME
from edgefl.simulator.functions import SimulationPlan
from edgefl.system.distribution import version
from edgefl.system.files import write_text
from edgefl.system.memory import cores
from edgefl.system.processes import last_line
from edgefl.system.structs import filled
from edgefl.wire import tensors


class TaskName(StrEnum):
    """Names in :data:`TASKS`."""

    pfl = "pfl-cifar10"
    flute = "flute-mnist"
    linear = "linear"


class EngineName(StrEnum):
    """Names in :func:`engines`."""

    edgefl = "edgefl"
    edgefl_1_thread = "edgefl-1-thread"
    edgefl_workers = "edgefl-workers"
    pfl = "pfl"
    pfl_1_thread = "pfl-1-thread"
    flower = "flower"


class SimulateRow(msgspec.Struct, frozen=True, kw_only=True):
    """One task on one engine.

    Attributes:
        clients_per_s: trained clients per second, from the end of the first round, in which an engine starts up.
        seconds: time of ``rounds`` rounds after the first.
        peak_rss_bytes: highest resident memory of all processes together; shared pages count for each.
        final_accuracy: accuracy on the whole test set.
        limit_clients_per_s: limit of the processor's arithmetic (:func:`limit`).
    """

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


def simulate(
    task: Annotated[list[TaskName] | None, typer.Option(help="may be repeated; default: all")] = None,
    engine: Annotated[list[EngineName] | None, typer.Option(help="may be repeated; default: all")] = None,
    rounds: Annotated[int, typer.Option(min=0, help="number of rounds; 0: the task's own")] = 0,
    as_json: Json = False,
) -> None:
    """Clients per second of simulators on this machine, one engine after another, each in processes of its own.

    pfl-cifar10: pfl-research's benchmark on CIFAR-10 (JPEG q75): its small CNN with dropout, 1,000 users of 50 samples, 50 a
    round, one epoch in batches of 10, 20 rounds. flute-mnist: logistic regression on MNIST, 1,000 clients of two classes and
    sizes of a power law, 10 a round, 6 steps of 10 samples each, 100 rounds. linear: edgefl with 1,000, 3,000 and 10,000
    clients, 1 % of them a round.

    Every engine has the same arrays, rows of clients, initial weights, steps and batches, and draws clients and batches
    itself. The first round, in which engines start up, does not count. Evaluation follows after all rounds. Memory sums
    all processes of an engine together. The limit assumes that a step consists of its convolutions and products alone, at
    the speed of a large product of float32 matrices.

    edgefl runs with its default settings, with one thread (edgefl-1-thread), and with a worker on each core
    (edgefl-workers); pfl 0.6 with torch's default threads and with one (pfl-1-thread); Flower on Ray with an actor on each
    core. The peers have environments of their own, which are made when they are needed (`python -m benchmarks peer pfl`,
    `... flower-simulation`); one that cannot be installed is reported and left out.

    Examples:

      python -m benchmarks simulate --json

      python -m benchmarks simulate --task flute-mnist --engine edgefl --engine pfl --rounds 20
    """

    known = engines()
    cases = [
        (size, known[each])
        for name in task or TaskName
        for each in engine or EngineName
        if name != TaskName.linear or each == EngineName.edgefl
        for size in TASKS[name]
    ]
    rows, failed = measured(cases, lambda case, say: measure(*case, rounds=rounds, say=say), _columns)
    # A peer that cannot be installed here is reported, and is no failure.
    report("simulate", "simulate", rows, _columns, as_json, () if rows else failed)


def _columns(row: SimulateRow) -> dict[str, Any]:
    return {
        "task": row.task,
        "engine": row.engine,
        "clients": row.clients,
        "a round": row.per_round,
        "clients/s": row.clients_per_s,
        "limit": row.limit_clients_per_s,
        "peak MiB": mebibytes(row.peak_rss_bytes),
        "accuracy": f"{row.final_accuracy:.3f}",
    }


@dataclass(frozen=True)
class SimulationTask:
    """Task for every simulator.

    Attributes:
        model: name in :data:`benchmarks.workers.simulation.MODELS`.
        data: table of the federation file.
        skewed: replace the partition of ``data`` by :func:`skewed`.
    """

    name: str
    model: str
    data: dict[str, Any]
    clients: int
    per_round: int
    rounds: int
    steps: int
    batch: int
    lr: float
    skewed: bool = False

    def write(self, folder: Path, simulation: dict[str, Any]) -> tuple[int, ...]:
        """Write the federation file and the arrays for every engine; return the shape of a sample.

        Raises DataError if the dataset is not found.
        """
        data = dict(self.data)
        if self.skewed:
            path = skewed(datasets.load(data["name"]), self.clients).save(folder / "data.npz")
            data |= {"name": "file", "file": str(path), "partition": "owners"}
        federation = completed(self._federation(data, simulation))
        dataset = open_data(federation)
        parts = partition(federation, dataset, len(device_names(federation)))
        write_text(folder / FEDERATION, dump(federation))
        own = {
            each.name: getattr(self, each.name) for each in fields(SimulationJob) if hasattr(self, each.name)
        }
        job = SimulationJob(**own, scale=dataset.scale, shift=dataset.shift)
        train, test = (dataset.train_x, dataset.train_y), (dataset.test_x, dataset.test_y)
        JobFolder.write(folder, job, train, test, parts)
        return tuple(dataset.train_x.shape[1:])

    def _federation(self, data: dict[str, Any], simulation: dict[str, Any]) -> Federation:
        tables = {
            "federation": {"name": self.name, "rounds": self.rounds},
            "model": {"name": f"benchmarks.workers.simulation:{self.model}"},
            "algorithm": {
                "batch": self.batch,
                "steps": self.steps,
                "lr": self.lr,
                "momentum": 0.0,
                "weight_decay": 0.0,
            },
            "data": {"test_samples": 0, **data},
            "round": {
                "fraction": self.per_round / self.clients,
                "weighting": "samples",
                "evaluate_every": 0,
            },
            "tiers": {"all": {"count": self.clients}},
            "simulation": simulation,
        }
        return parse(tables, source=f"task {self.name}")


_CLASSES = 10
_LARGEST = 400


def skewed(dataset: Dataset, clients: int, seed: int = 0) -> Dataset:
    """Return the dataset with LEAF's partition of MNIST: two classes per client, half of its rows of each.

    Sizes follow a power law: 10 and a log-normal number (median 20, deviation 1 of the logarithm), at most 400. Rows without
    a client are left out.
    """
    draw = np.random.default_rng(seed)
    sizes = np.minimum(10 + draw.lognormal(np.log(20.0), 1.0, clients), _LARGEST).astype(int)
    left = [draw.permutation(np.flatnonzero(dataset.train_y == label)).tolist() for label in range(_CLASSES)]
    rows: list[int] = []
    owners: list[int] = []
    for client, size in enumerate(sizes):
        for label, count in (
            (client % _CLASSES, (size + 1) // 2),
            ((client + 1) % _CLASSES, size // 2),
        ):
            taken = [left[label].pop() for _ in range(min(count, len(left[label])))]
            rows += taken
            owners += [client] * len(taken)
    return _of(dataset, rows, owners)


def _of(dataset: Dataset, rows: Sequence[int], owners: Sequence[int]) -> Dataset:
    chosen: Array = np.array(rows)
    return replace(
        dataset,
        train_x=dataset.train_x[chosen],
        train_y=dataset.train_y[chosen],
        owners=np.array(owners, np.int64),
    )


_MNIST = {"name": "mnist", "partition": "iid"}


def _linear(clients: int) -> SimulationTask:
    return SimulationTask("linear", "logistic", _MNIST, clients, clients // 100, 20, 6, 10, 0.03)


TASKS: dict[str, tuple[SimulationTask, ...]] = {
    "pfl-cifar10": (
        SimulationTask(
            "pfl-cifar10",
            "pfl_cnn",
            {"name": "cifar10_jpeg", "partition": "iid"},
            clients=1000,
            per_round=50,
            rounds=20,
            steps=5,
            batch=10,
            lr=0.1,
        ),
    ),
    "flute-mnist": (
        SimulationTask("flute-mnist", "logistic", _MNIST, 1000, 10, 100, 6, 10, 0.03, skewed=True),
    ),
    "linear": tuple(_linear(clients) for clients in (1000, 3000, 10_000)),
}
"""Sizes of each task; ``linear`` is for edgefl alone, with 1 % of the clients in each round."""
FEDERATION = "federation.toml"
_OUT = "out"


def edgefl_arguments(folder: Path) -> list[str]:
    """Return the arguments of Python."""
    return ["-m", "edgefl", "simulate", str(folder / FEDERATION), "--out", str(folder / _OUT), "--json"]


def edgefl_result(folder: Path, moments: Sequence[float]) -> dict[str, Any]:
    """Return the result of the run in ``folder``. ``moments``: times at which the command reported a round."""
    federation = load(folder / FEDERATION)
    each = federation.round.model_copy(update={"evaluate_every": 1})
    spec = SimulationPlan.of(federation.model_copy(update={"round": each}), open_data(federation)).spec
    assert spec.evaluate is not None
    accuracy = spec.evaluate(tensors.load((folder / _OUT / MODEL_NAME).read_bytes()))["accuracy"]
    return run_result(moments, accuracy, version())


_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Variables that are removed, because an engine has its own default."""
_LOOK_S = 0.05
_LAST = 400


@dataclass(frozen=True)
class SimulationEngine:
    """Simulator to measure.

    Attributes:
        module: worker that runs it in the environment ``peer`` (:mod:`benchmarks.peers`); "" for ours.
        simulation: table of the federation file.
        environment: variables of its processes.
    """

    name: str
    module: str = ""
    peer: str = ""
    simulation: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)


def engines() -> dict[str, SimulationEngine]:
    """Return the engines by name: edgefl and pfl with many threads and with one, edgefl with workers, and Flower."""
    one = {"OMP_NUM_THREADS": "1"}
    found = [
        SimulationEngine("edgefl"),
        SimulationEngine("edgefl-1-thread", environment=one),
        SimulationEngine("edgefl-workers", simulation={"workers": cores()}, environment=one),
        SimulationEngine("pfl", module="pfl_simulation", peer="pfl"),
        SimulationEngine("pfl-1-thread", module="pfl_simulation", peer="pfl", environment=one),
        SimulationEngine("flower", module="flower_simulation", peer="flower-simulation"),
    ]
    return {each.name: each for each in found}


def measure(
    task: SimulationTask,
    engine: SimulationEngine,
    *,
    rounds: int = 0,
    say: Callable[[str], None] = lambda _: None,
) -> SimulateRow:
    """Measure one task on one engine.

    Args:
        task: the task.
        engine: the engine, which is installed if need be.
        rounds: number of rounds; 0: the task's own.
        say: receives the progress as text.

    Raises:
        EdgeflError: the engine cannot be installed, or fails.
    """
    task = replace(task, rounds=rounds or task.rounds)
    if task.rounds < 2:
        raise ConfigError(
            f"--rounds expects 2 or more, because the first does not count; found {task.rounds}"
        )
    python = make(peers()[engine.peer], say) if engine.peer else sys.executable
    with tempfile.TemporaryDirectory(prefix="edgefl-bench-") as name, import_path() as path:
        folder = Path(name)
        say(f"{task.name}: the data of {task.clients:,} clients")
        shape = task.write(folder, engine.simulation)
        say(f"{task.name}: {task.rounds} rounds of {engine.name}")
        inherited = {key: value for key, value in os.environ.items() if key not in _THREADS}
        environment = {**inherited, **engine.environment, **_quiet(engine, path)}
        module = ["-m", f"benchmarks.workers.{engine.module}", name]
        arguments = module if engine.peer else edgefl_arguments(folder)
        lines, peak = _run([python, *arguments], environment)
        if engine.peer:
            result: dict[str, Any] = json.loads(lines[-1].text)
        else:
            result = edgefl_result(folder, [line.moment for line in lines])
    return filled(
        SimulateRow,
        task,
        task=task.name,
        engine=engine.name,
        clients_per_s=round(task.per_round * result["rounds"] / result["seconds"], 2),
        limit_clients_per_s=round(limit(task, shape, rate()), 2),
        peak_rss_bytes=peak,
        final_accuracy=round(result["accuracy"], 4),
        seconds=round(result["seconds"], 6),
        rounds=result["rounds"],
        version=result["version"],
    )


def _quiet(engine: SimulationEngine, path: Path) -> dict[str, str]:
    """Return the variables with which a peer finds our packages and sends no telemetry."""
    quiet = {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"}
    return {"PYTHONPATH": str(path), **quiet} if engine.peer else {}


@dataclass(frozen=True)
class _OutputLine:
    moment: float
    text: str


def _run(command: list[str], environment: dict[str, str]) -> tuple[list[_OutputLine], int]:
    """Run a process; return its lines and its peak memory. Raises EdgeflError with its last line."""
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log,
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=log, text=True) as process,
    ):
        assert process.stdout is not None
        memory = _PeakSampler(process.pid)
        try:
            lines = [_OutputLine(time.perf_counter(), line) for line in process.stdout if line.strip()]
            process.wait()
        except BaseException:
            process.terminate()
            raise
        finally:
            memory.stop()
        if process.returncode:
            log.seek(0)
            last = last_line(log.read(), f"exit code {process.returncode}")
            raise EdgeflError(f"{' '.join(command[1:4])} ended: {last[-_LAST:]}")
    return lines, memory.peak


class _PeakSampler:
    """Sampler of the highest resident memory of a process and its children."""

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
    """Count the operations of convolutions and matrix products in a step on ``x``, forward and backward."""
    counter = FlopCounterMode(display=False)
    with counter:
        model(x).sum().backward()
    return int(counter.get_total_flops())


@functools.cache
def rate() -> float:
    """Measure once how many operations per second torch's products of float32 matrices reach on all cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(cores())
    try:
        left, right = torch.randn(_SIDE, _SIDE), torch.randn(_SIDE, _SIDE)
        left @ right
        return 2 * _SIDE**3 / min(timeit.repeat(lambda: left @ right, number=1, repeat=_TIMES))
    finally:
        torch.set_num_threads(before)


def limit(task: SimulationTask, shape: tuple[int, ...], rate: float) -> float:
    """Return the clients per second at ``rate`` operations per second, on samples of ``shape``."""
    return rate / (task.steps * operations(MODELS[task.model](), torch.zeros(task.batch, *shape)))
