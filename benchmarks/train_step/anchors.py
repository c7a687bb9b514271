"""Engines to compare a step with, besides torch eager, each in its own process; the failure of one ends nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.common.machine import import_path, own_environment
from benchmarks.common.worker import Worker, WorkerFailed
from benchmarks.train_step import et_training, jax_graph, onnxsim_training, ort_training
from edgefl.errors import EdgeflError
from edgefl.submodels.output_side.submodel import OutputSide
from edgefl.system.python import module_command
from edgefl_export.memory.recompute import Budget

FIRST = 3
"""Steps before the race, in which a worker compiles: the second has momentum, the third is of what the second compiled."""
SAME = 5e-2
"""Largest relative difference between the losses of those steps and torch eager's, beyond which it trains something else.
Rounding decides in deep models: MobileNet's third loss differs by 8e-3 between two layouts of torch's own."""
_LONGEST = 1000


@dataclass(frozen=True)
class Job:
    """Job of the race: the folder with the model and its batches; ``noisy``: the model draws noise, as dropout does."""

    model: str
    folder: Path
    submodel: OutputSide
    settings: TrainStepSettings
    noisy: bool


Start = Callable[[contextlib.ExitStack, Job], Worker]


@dataclass(frozen=True)
class Anchor:
    """``title`` is for people. ``same``: it makes eager's very step, so that its losses must be eager's. ``alone``: so many
    steps are timed after the race, since others would wait for them too long."""

    title: str
    start: Start
    same: bool
    alone: int = 0


@dataclass(frozen=True)
class Outcome:
    """An anchor's worker, or the problem why it has none; neither where it was not asked for."""

    worker: Worker | None = None
    problem: str | None = None
    loss_error: float | None = None

    def fields(self, name: str) -> dict[str, Any]:
        """Return the fields of a row that every anchor has: milliseconds, and the problem."""
        timed = self.worker if self.worker and self.worker.times else None
        return {
            f"{name}_ms": timed.median_ms if timed else None,
            f"{name}_ms_min": timed.fastest_ms if timed else None,
            f"{name}_error": self.problem,
        }


def opened(stack: contextlib.ExitStack, name: str, job: Job, eager: Worker) -> Outcome:
    """The worker of anchor ``name`` after its first steps, as many as ``eager`` has made; whatever fails is its problem."""
    anchor = ANCHORS[name]
    try:
        worker = stack.enter_context(anchor.start(stack, job))
        worker.run(1 if anchor.alone else FIRST, count=False)
        if anchor.alone:
            worker.run(anchor.alone)
        compared = anchor.same and not job.noisy
        difference = loss_error(worker.values, eager.values) if compared else None
    except Exception as error:  # software of others, and ours around it: the rest goes on
        whole = name in ("ort_training", "et_training")
        why = error.log.strip() if whole and isinstance(error, WorkerFailed) else ""
        return Outcome(problem=why[-_LONGEST:] or _line(error)[:_LONGEST])
    return Outcome(worker, loss_error=difference)


def loss_error(found: list[float], wanted: list[float]) -> float:
    """Largest relative difference between losses of the first steps; EdgeflError where it is no rounding any more."""
    pairs = list(zip(found[:FIRST], wanted[:FIRST], strict=True))
    worst = max(abs(ours - theirs) / abs(theirs) for ours, theirs in pairs)
    if not worst <= SAME:
        told = "; ".join(f"{ours:.6g} and {theirs:.6g}" for ours, theirs in pairs)
        raise EdgeflError(f"it trains something else: its losses and torch eager's are {told}", losses=found)
    return worst


def _line(error: Exception) -> str:
    """A worker's last words, or what went wrong on our side, in one line."""
    text = str(error) if isinstance(error, WorkerFailed | EdgeflError) else f"{type(error).__name__}: {error}"
    return " ".join(text.split())


def _here(job: Job, module: str, *arguments: str, **more: str) -> Worker:
    command = module_command(f"benchmarks.train_step.{module}", str(job.folder), str(job.settings.threads))
    return Worker([*command, *arguments], {**job.settings.environment, **more})


def _compile(stack: contextlib.ExitStack, job: Job) -> Worker:
    # In one process, so that no pool of compilers is left beside the race; from nothing, so that every run does the same.
    cache = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": str(job.folder / "inductor")}
    return _here(job, "eager", "compile", **cache)


def _channels_last(stack: contextlib.ExitStack, job: Job) -> Worker:
    shape = job.submodel.boundary.shape
    if len(shape) != 3:
        raise EdgeflError(f"only images have channels that can lie last; a sample here has the shape {shape}")
    return _here(job, "eager", "channels_last")


def _et_training(stack: contextlib.ExitStack, job: Job) -> Worker:
    et_training.prepare(job.folder, job.submodel)
    return _here(job, "et_training")


def _elsewhere(setting: str, prepare: Callable[[Path, OutputSide, int], None], module: str) -> Start:
    """Return the start of our ``module`` with the interpreter that ``setting`` names; ``prepare`` writes its files first."""

    def start(stack: contextlib.ExitStack, job: Job) -> Worker:
        prepare(job.folder, job.submodel, job.settings.batch)
        path, python = stack.enter_context(import_path()), getattr(job.settings, setting)
        command = [python, "-m", f"benchmarks.train_step.{module}", job.folder, job.settings.threads]
        return Worker([*map(str, command)], {**job.settings.environment, "PYTHONPATH": str(path)})

    return start


_ORT_TRAINING = _elsewhere("ort_training", ort_training.prepare, "ort_training")
_JAX = _elsewhere("jax", jax_graph.prepare, "jax_training")
_ONNXSIM = _elsewhere("onnxsim", onnxsim_training.prepare, "onnxsim_training")
ANCHORS: Mapping[str, Anchor] = {
    "ort_training": Anchor("onnxruntime-training", _ORT_TRAINING, same=False),  # it has no momentum
    "compile": Anchor("torch.compile", _compile, same=True),
    "jax": Anchor("JAX", _JAX, same=True),
    "onnxsim": Anchor("onnxsim's training loop", _ONNXSIM, same=True),  # but for the weights' decay, of 1e-4
    "channels_last": Anchor("torch with channels last", _channels_last, same=True),
    "et_training": Anchor(  # it has no optimizer, and a step of convolutions takes many seconds
        "ExecuTorch's training export", _et_training, same=False, alone=2
    ),
}
"""By the name of their setting, which begins their fields of a row."""


@dataclass(frozen=True)
class TrainStepSettings:
    """Settings of the benchmark. ``ort_training``, ``jax`` and ``onnxsim`` are Python interpreters of environments that have
    onnxruntime-training, JAX, and onnxsim with onnxruntime.

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
    jax: str = ""
    onnxsim: str = ""
    # Whether ExecuTorch's own training export runs too, which takes minutes.
    et_training: bool = False
    # Torch's step through torch.compile, which needs a C++ compiler and takes a minute or more to compile.
    compile: bool = False
    # Torch's step on images whose channels lie innermost in memory.
    channels_last: bool = False
    # Try the variants of the step first, as a device does, and measure the fastest form.
    tune: bool = False
    # Without tune: measure the graph's own form, not the one that suits the processor.
    own_form: bool = False
    # How values wait for the backward pass of the exported step.
    activations: str = "float32"
    # Recomputation and paging until the peak over idle fits; None is as fast as it can be.
    memory_budget: Budget | None = None

    @property
    def environment(self) -> dict[str, str]:
        """Variables of every measured process."""
        return own_environment(self.threads)
