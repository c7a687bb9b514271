"""Baselines beside torch eager, each in its own process. The failure of one ends nothing else."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.machine import import_path, own_environment
from benchmarks.repetition import StepWorker, WorkerFailed
from benchmarks.train_step import et_training, jax_graph, onnxsim_training, ort_training
from edgefl.errors import EdgeflError
from edgefl.submodels.output_side.submodel import OutputSide
from edgefl.system.processes import module_command
from edgefl_export.memory.recompute import Budget

FIRST = 3
"""Steps before the race, in which a worker compiles. The second has momentum; the third runs the second's compiled code."""
SAME = 5e-2
"""Largest relative difference between the first losses and torch eager's, beyond which it trains something else. Rounding
decides in deep models: MobileNet's third loss differs by 8e-3 between two layouts of torch's own."""
_LONGEST = 1000
"""Longest text of a problem, in characters."""


@dataclass(frozen=True)
class TrainStepSettings:
    """Settings of one measured step.

    Attributes:
        batch: samples per step.
        target: engine of the exported step.
        threads: threads of every engine.
        repeat: blocks of steps per engine.
        tier: trained part of the model.
        length: number of tokens of shortened samples; 0: whole samples.
        options: options of the model.
        ort_training, jax, onnxsim: interpreters of environments with these libraries, "" for none.
        et_training: run ExecuTorch's own training export too.
        compile: run torch.compile too.
        channels_last: run torch eager on images with channels innermost too.
        tune: try the variants of the step first, and measure the fastest form.
        own_form: without ``tune``: measure the graph's own form, not the one that suits the processor.
        activations: type of the values that wait for the backward pass.
        memory_budget: peak over idle that recomputation and paging must reach; None: the fastest step.
    """

    batch: int = 32
    target: str = "onnx"
    threads: int = 1
    repeat: int = 5
    tier: str = "strong"
    length: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)
    ort_training: str = ""
    jax: str = ""
    onnxsim: str = ""
    et_training: bool = False
    compile: bool = False
    channels_last: bool = False
    tune: bool = False
    own_form: bool = False
    activations: str = "float32"
    memory_budget: Budget | None = None

    @property
    def environment(self) -> dict[str, str]:
        """Variables of every measured process."""
        return own_environment(self.threads)


@dataclass(frozen=True)
class RaceJob:
    """Model and settings of a race, and the folder with its files. ``noisy``: the model draws noise, like dropout."""

    model: str
    folder: Path
    submodel: OutputSide
    settings: TrainStepSettings
    noisy: bool


@dataclass(frozen=True)
class Baseline:
    """Trainer to compare with.

    Attributes:
        title: name for people.
        same: True if it makes eager's very step, so that its losses must be eager's.
        alone: number of steps that are timed after the race, because the others would wait too long.
    """

    title: str
    same: bool
    alone: int = 0


BASELINES: Mapping[str, Baseline] = {
    "ort_training": Baseline("onnxruntime-training", same=False),  # it has no momentum
    "compile": Baseline("torch.compile", same=True),
    "jax": Baseline("JAX", same=True),
    "onnxsim": Baseline("onnxsim's training loop", same=True),  # but for the weights' decay, of 1e-4
    "channels_last": Baseline("torch with channels last", same=True),
    # It has no optimizer, and a step of convolutions takes many seconds.
    "et_training": Baseline("ExecuTorch's training export", same=False, alone=2),
}
"""By the name of their setting, which is also the prefix of their fields in a row."""


@dataclass(frozen=True)
class BaselineResult:
    """Worker of a baseline, or the problem that prevented it; neither if it was not requested."""

    worker: StepWorker | None = None
    problem: str | None = None
    loss_error: float | None = None

    def fields(self, name: str) -> dict[str, Any]:
        """Return the fields of a row that every baseline has: milliseconds, and the problem."""
        timed = self.worker if self.worker and self.worker.times else None
        fields: dict[str, Any] = {
            f"{name}_ms": timed.median_ms if timed else None,
            f"{name}_ms_min": timed.fastest_ms if timed else None,
            f"{name}_error": self.problem,
        }
        if BASELINES[name].same:
            fields[f"{name}_loss_error"] = self.loss_error
        return fields


def open_baseline(stack: contextlib.ExitStack, name: str, job: RaceJob, eager: StepWorker) -> BaselineResult:
    """Start a baseline and run its first steps, as many as ``eager`` has made. A failure becomes its problem."""
    baseline = BASELINES[name]
    try:
        worker = stack.enter_context(_start(stack, name, job))
        worker.run(1 if baseline.alone else FIRST, count=False)
        if baseline.alone:
            worker.run(baseline.alone)
        compared = baseline.same and not job.noisy
        difference = loss_error(worker.values, eager.values) if compared else None
    except Exception as error:  # software of others, and ours around it: the other engines are still measured
        whole = name in ("ort_training", "et_training")
        why = error.log.strip() if whole and isinstance(error, WorkerFailed) else ""
        return BaselineResult(problem=why[-_LONGEST:] or _one_line(error)[:_LONGEST])
    return BaselineResult(worker, loss_error=difference)


def loss_error(losses: list[float], expected: list[float]) -> float:
    """Return the largest relative difference between the losses of the first steps.

    Raises:
        EdgeflError: the difference is larger than rounding.
    """
    pairs = list(zip(losses[:FIRST], expected[:FIRST], strict=True))
    worst = max(abs(ours - theirs) / abs(theirs) for ours, theirs in pairs)
    if not worst <= SAME:
        text = "; ".join(f"{ours:.6g} and {theirs:.6g}" for ours, theirs in pairs)
        raise EdgeflError(f"it trains something else: its losses and torch eager's are {text}", losses=losses)
    return worst


def _one_line(error: Exception) -> str:
    text = str(error) if isinstance(error, WorkerFailed | EdgeflError) else f"{type(error).__name__}: {error}"
    return " ".join(text.split())


def _start(stack: contextlib.ExitStack, name: str, job: RaceJob) -> StepWorker:
    """Write the files of a baseline and return its worker; enter it to start."""
    folder, submodel, batch = job.folder, job.submodel, job.settings.batch
    match name:
        case "compile":
            # In one process, so that no pool of compilers runs beside the race; without a cache, so that runs are alike.
            cache = {
                "TORCHINDUCTOR_COMPILE_THREADS": "1",
                "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
            }
            return _worker_here(job, "eager", "compile", **cache)
        case "channels_last":
            shape = submodel.boundary.shape
            if len(shape) != 3:
                raise EdgeflError(
                    f"only images have channels that can lie last; a sample here has the shape {shape}"
                )
            return _worker_here(job, "eager", "channels_last")
        case "et_training":
            et_training.prepare(folder, submodel)
            return _worker_here(job, "et_training")
        case "ort_training":
            ort_training.prepare(folder, submodel, batch)
        case "jax":
            jax_graph.prepare(folder, submodel, batch)
        case "onnxsim":
            onnxsim_training.prepare(folder, submodel, batch)
    module = name if name == "ort_training" else f"{name}_training"
    python, path = getattr(job.settings, name), stack.enter_context(import_path())
    command = [python, "-m", f"benchmarks.train_step.{module}", folder, job.settings.threads]
    return StepWorker([*map(str, command)], {**job.settings.environment, "PYTHONPATH": str(path)})


def _worker_here(job: RaceJob, module: str, *arguments: str, **more: str) -> StepWorker:
    command = module_command(f"benchmarks.train_step.{module}", str(job.folder), str(job.settings.threads))
    return StepWorker([*command, *arguments], {**job.settings.environment, **more})
