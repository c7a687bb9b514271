"""One training step: the exported graph on the device's engine beside torch eager, and beside onnxruntime-training.

Each engine has a fresh process of its own, so that its memory is its own; they take turns in blocks of steps, so that
whatever else the machine does hits all of them.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from edgefl import programs
from edgefl.bench.common.as_written import check_as_written
from edgefl.bench.common.device_graph import BATCHES, write_graph
from edgefl.bench.common.machine import quiet_environment
from edgefl.bench.common.worker import Worker, WorkerFailed
from edgefl.bench.train_step import et_training, ort_training
from edgefl.bench.train_step.model import built
from edgefl.contract.program import Function, Program
from edgefl.contract.tensors import role_of
from edgefl.objective.objective import Objective
from edgefl.submodels.output_side.submodel import OutputSide
from edgefl.wire.errors import ConfigError, EdgeflError, ExportError
from edgefl.wire.tensors import Arrays
from exporters.artifact import Artifact
from exporters.bundle.formats import Format, format_of
from exporters.capture.trace import Captured
from exporters.memory.recompute import Budget

MODELS = ("resnet20", "resnet18", "cnn", "mobilenet", "bert", "vit", "bilstm", "lstm_lm")

WARM_UP = 3
BLOCK_MS = 1500.0
"""A block is as many steps as fit in this time, at least two and at most ``BLOCK_MOST``."""
BLOCK_MOST = 20
SGD: Mapping[str, float] = {"lr": 0.01, "momentum": 0.9, "weight_decay": 1e-4}
VERIFY_SEED = 0


class StepRow(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds per step, medians (and minima) over all counted steps; bytes of resident memory over idle.

    ``ratio`` is ``ms / eager_ms``. ``max_rel_error`` is the worst output of one step beside torch, over loss, new
    weights, momentum (gradients) and statistics. Where rounding decides (kinks of deep models), that error is beside
    float64, and ``rounding_error`` is torch's own beside float64; null elsewhere. ``load_s`` is the time until the device
    can run the graph, ``length`` the tokens of a sample where it is shorter than the model's, ``memory_budget`` the bytes
    it was compiled for (0: none). ``ort_training_*`` are null where onnxruntime-training was not asked for or cannot
    train the model (``ort_training_error`` says why); ``et_training_*`` likewise for ExecuTorch's own training export,
    which computes loss and gradients only.
    """

    model: str
    target: str
    batch: int
    threads: int
    ms: float
    eager_ms: float
    ratio: float
    max_rel_error: float
    peak_over_idle_bytes: int
    eager_peak_over_idle_bytes: int
    ms_min: float
    eager_ms_min: float
    steps: int
    memory_ratio: float
    export_s: float
    load_s: float
    artifact_bytes: int
    idle_bytes: int
    eager_idle_bytes: int
    parameters: int
    tier: str
    model_options: dict[str, Any]
    length: int = 0
    memory_budget: int = 0
    rounding_error: float | None = None
    ort_training_ms: float | None = None
    ort_training_ms_min: float | None = None
    ort_training_peak_over_idle_bytes: int | None = None
    ort_training_error: str | None = None
    et_training_ms: float | None = None
    et_training_ms_min: float | None = None
    et_training_error: str | None = None


@dataclass(frozen=True)
class TrainStepSettings:
    """What is measured. ``ort_training`` is the Python interpreter of an environment that has onnxruntime-training.

    Raises ConfigError for an interpreter that is not there.
    """

    batch: int = 32
    target: str = "onnx"
    threads: int = 1
    repeat: int = 5
    tier: str = "strong"
    # Of sequences: for samples of which no more tokens count; 0 is whole ones.
    length: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)
    ort_training: str = ""
    # Whether ExecuTorch's own training export runs too, which takes minutes.
    et_training: bool = False
    # Recomputation until the peak over idle fits; None is as fast as it can be.
    memory_budget: Budget | None = None

    def __post_init__(self) -> None:
        if self.ort_training and shutil.which(self.ort_training) is None:
            raise ConfigError(
                f"there is no Python interpreter {self.ort_training!r} for onnxruntime-training; give the path of one, "
                "such as ort-training/bin/python",
                ort_training=self.ort_training,
            )


def measure(model: str, settings: TrainStepSettings, say: Callable[[str], None] = lambda _: None) -> StepRow:
    """Export one model's step, check it against torch, and time it. Raises ModelError or ExportError."""
    submodel = built(model, settings.options, settings.tier, settings.length)
    program = programs.build("sgd", Objective.of(submodel), batch=settings.batch, **SGD)
    function, form = program.phases[0].function, format_of(settings.target)
    check_as_written(submodel.suffix, function.example(VERIFY_SEED)["batch.0.x"])
    with tempfile.TemporaryDirectory(prefix="edgefl-bench-") as name:
        folder = Path(name)
        say(f"{model}: exporting")
        start = time.perf_counter()
        captured, artifact, budget = compiled(function, settings.memory_budget, form)
        export_s = time.perf_counter() - start
        say(f"{model}: comparing with torch")
        error, rounding = _errors(function, artifact.model, form)
        _write_job(folder, model, settings, program, submodel)
        write_graph(folder, captured, artifact, form.name, memory_budget=budget)
        device, eager, other, problem = _race(folder, model, settings, submodel, say)
        training, why = _et_training(folder, model, settings, submodel, say)
    return StepRow(
        model=model,
        target=settings.target,
        batch=settings.batch,
        threads=settings.threads,
        ms=_median(device),
        eager_ms=_median(eager),
        ratio=round(_median(device) / _median(eager), 4),
        max_rel_error=error,
        peak_over_idle_bytes=device.peak,
        eager_peak_over_idle_bytes=eager.peak,
        ms_min=round(min(device.times), 3),
        eager_ms_min=round(min(eager.times), 3),
        steps=len(device.times),
        memory_ratio=round(device.peak / eager.peak, 4),
        export_s=round(export_s, 2),
        load_s=round(device.load_s, 4),
        artifact_bytes=len(artifact.model),
        idle_bytes=device.idle,
        eager_idle_bytes=eager.idle,
        parameters=sum(parameter.numel() for parameter in submodel.suffix.parameters()),
        tier=settings.tier,
        model_options=dict(settings.options),
        length=settings.length,
        memory_budget=budget,
        rounding_error=rounding,
        ort_training_ms=_median(other) if other else None,
        ort_training_ms_min=round(min(other.times), 3) if other else None,
        ort_training_peak_over_idle_bytes=other.peak if other else None,
        ort_training_error=problem,
        et_training_ms=_median(training) if training else None,
        et_training_ms_min=round(min(training.times), 3) if training else None,
        et_training_error=why,
    )


def compiled(function: Function, wanted: Budget | None, form: Format) -> tuple[Captured, Artifact, int]:
    """The step, what is exported of it, and its memory budget in bytes (0: none)."""
    captured = form.capture(function)
    if wanted is None:
        return captured, form.write(captured), 0
    return captured, *form.write_within(captured, wanted)


def _errors(function: Function, model: bytes, form: Format) -> tuple[float, float | None]:
    """Largest relative error of an output, and torch's own where rounding decides.

    An error beyond the tolerance is told in the row, not hidden with the row.
    """
    try:
        report = form.verify(function, model, VERIFY_SEED)
    except ExportError as error:
        worst = error.details.get("worst")
        if not isinstance(worst, float) or not math.isfinite(worst):
            raise
        return worst, None
    return report.worst, max(report.rounding.values(), default=None)


def _median(worker: Worker) -> float:
    return round(statistics.median(worker.times), 3)


# -- the processes ---------------------------------------------------------------------------------------------


def _race(
    folder: Path, model: str, settings: TrainStepSettings, submodel: OutputSide, say: Callable[[str], None]
) -> tuple[Worker, Worker, Worker | None, str | None]:
    """The device's worker, torch's, onnxruntime-training's where it runs, and why it does not."""
    environment = _environment(settings)
    arguments = [str(folder), str(settings.threads)]
    device, eager = (
        Worker([sys.executable, "-m", module, *arguments], environment)
        for module in ("edgefl.bench.train_step.device", "edgefl.bench.train_step.eager")
    )
    with contextlib.ExitStack() as stack:
        try:
            workers = [stack.enter_context(device), stack.enter_context(eager)]
            other, problem = _third(stack, folder, settings, submodel, environment)
            workers += [other] if other else []
            take_turns(workers, settings.repeat, lambda text: say(f"{model}: {text}"))
        except WorkerFailed as error:
            raise EdgeflError(
                f"a process that measures {model!r} ended: {error}", model=model, log=error.log
            ) from error
    return device, eager, other, problem


def _environment(settings: TrainStepSettings) -> dict[str, str]:
    return quiet_environment() | {"OMP_NUM_THREADS": str(settings.threads)}


def _et_training(
    folder: Path, model: str, settings: TrainStepSettings, submodel: OutputSide, say: Callable[[str], None]
) -> tuple[Worker | None, str | None]:
    """ExecuTorch's own training export, after the race: a step takes so long that the others would wait for it."""
    if not settings.et_training:
        return None, None
    environment = _environment(settings)
    return et_training.run(
        folder, submodel, settings.threads, environment, lambda text: say(f"{model}: {text}")
    )


def _third(
    stack: contextlib.ExitStack,
    folder: Path,
    settings: TrainStepSettings,
    submodel: OutputSide,
    environment: Mapping[str, str],
) -> tuple[Worker | None, str | None]:
    if not settings.ort_training:
        return None, None
    try:
        ort_training.prepare(folder, submodel, settings.batch)
        path = stack.enter_context(import_path())
        command = [settings.ort_training, "-m", "edgefl.bench.train_step.ort_training"]
        worker = Worker(
            [*command, str(folder), str(settings.threads)], {**environment, "PYTHONPATH": str(path)}
        )
        stack.enter_context(worker)
        worker.run(1, count=False)
    except Exception as error:  # a retired package and another exporter: whatever it is, the rest goes on
        why = error.log.strip() if isinstance(error, WorkerFailed) else ""
        return None, (why or f"{type(error).__name__}: {error}")[-1000:]
    return worker, None


def _folder(package: str) -> str:
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.submodule_search_locations is not None
    return spec.submodule_search_locations[0]


@contextlib.contextmanager
def import_path() -> Iterator[Path]:
    """A folder in which another environment finds our packages, and none of the packages installed beside them."""
    with tempfile.TemporaryDirectory(prefix="edgefl-path-") as name:
        for package in ("edgefl", "device_runtime"):
            os.symlink(_folder(package), Path(name) / package)
        yield Path(name)


def take_turns(workers: Sequence[Worker], repeat: int, say: Callable[[str], None]) -> None:
    """Warm up, then ``repeat`` blocks of equally many steps for each worker, by turns."""
    say("warming up")
    slowest = max(min(worker.run(WARM_UP, count=False)) for worker in workers)
    steps = int(min(BLOCK_MOST, max(2, BLOCK_MS / slowest)))
    for block in range(1, repeat + 1):
        say(f"block {block} of {repeat}, {steps} steps each")
        for worker in workers:
            worker.run(steps)


# -- what they are given -----------------------------------------------------------------------------------------


def _write_job(
    folder: Path, model: str, settings: TrainStepSettings, program: Program, submodel: OutputSide
) -> None:
    """The model by name for torch; for both, the batches and the state that the program starts from."""
    part = {"options": dict(settings.options), "tier": settings.tier, "length": settings.length}
    job = {"model": model, **part, "sgd": dict(SGD)}
    (folder / "job.json").write_text(json.dumps(job))
    weights = {f"weights.{name}": value.detach() for name, value in submodel.suffix.state_dict().items()}
    state = program.start(weights)
    np.savez(folder / "state.npz", **{name: value.numpy() for name, value in state.items()})  # type: ignore[arg-type]
    function = program.phases[0].function
    for seed in range(BATCHES):
        np.savez(folder / f"batch{seed}.npz", **_batch(function, program.hyper, seed))  # type: ignore[arg-type]


def _batch(function: Function, hyper: Mapping[str, float], seed: int) -> Arrays:
    """What a step reads beside state and noise: random samples and labels, and the scalars."""
    example = function.example(seed)
    batch = {name: value.numpy() for name, value in example.items() if role_of(name) == "batch"}
    return batch | {f"hyper.{name}": np.asarray(value, np.float32) for name, value in hyper.items()}
