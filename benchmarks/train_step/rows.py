"""One training step: the exported graph on the device's engine beside torch eager, and beside what else was asked for.

Each engine has a fresh process of its own, so that its memory is its own; they take turns in blocks of steps, so that
whatever else the machine does hits all of them.
"""

from __future__ import annotations

import contextlib
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.common.as_written import check_as_written
from benchmarks.common.device_graph import worker, write_arrays, write_graph
from benchmarks.common.machine import processor, running, take_turns, worker_of
from benchmarks.common.worker import Worker
from benchmarks.train_step.anchors import ANCHORS, FIRST, Job, Outcome, TrainStepSettings, opened
from benchmarks.train_step.model import built
from benchmarks.train_step.tuned import take_fastest
from edgefl import algorithms
from edgefl.algorithms.activations import stored
from edgefl.contract.algorithm import Function
from edgefl.contract.tensors import role_of
from edgefl.errors import ExportError
from edgefl.objective.objective import Objective
from edgefl.system.structs import filled
from edgefl_device.host import processor_features
from edgefl_device.round.suited import suited_form
from edgefl_export.artifact import Artifact
from edgefl_export.bundle.formats import Format, format_of
from edgefl_export.capture.trace import Captured
from edgefl_export.memory.recompute import Budget

MODELS = ("resnet20", "resnet18", "cnn", "mobilenet", "bert", "vit", "bilstm", "lstm_lm")
SGD: Mapping[str, float] = {"lr": 0.01, "momentum": 0.9, "weight_decay": 1e-4}
VERIFY_SEED = 0


class StepRow(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds per step, medians (and minima) over all counted steps; bytes of resident memory over idle.

    ``ratio`` is ``ms / eager_ms``. ``max_rel_error`` is the worst output of one step beside torch, over loss, new
    weights, momentum (gradients) and statistics. Where rounding decides (kinks of deep models), that error is beside
    float64, and ``rounding_error`` is torch's own beside float64; null elsewhere. ``load_s`` is the time until the device
    can run the graph, ``length`` the tokens of a sample where it is shorter than the model's, ``memory_budget`` the bytes
    it was compiled for (0: none), ``paged_bytes`` what a step writes to the disk and reads again, ``activations`` how values
    wait for the backward pass. ``cpu`` is the processor's name; ``cpu_ms`` is processor time, medians of what all threads of
    the process took for a step, waiting threads that spin included. ``variant`` is the form of the graph.

    ``ort_training_*`` are null where onnxruntime-training was not asked for or cannot train the model
    (``ort_training_error`` says why); likewise ``compile_*`` for torch.compile, ``jax_*`` for JAX, ``onnxsim_*`` for
    onnxsim's training loop, ``channels_last_*`` for torch eager on images with their channels innermost, and
    ``et_training_*`` for ExecuTorch's own training export, which computes loss and gradients only. ``*_loss_error`` is the
    largest relative difference between the first losses and torch eager's, null for a model that draws noise.
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
    activations: str = "float32"
    paged_bytes: int = 0
    rounding_error: float | None = None
    cpu: str
    cpu_ms: float
    eager_cpu_ms: float
    variant: str = "default"
    ort_training_ms: float | None = None
    ort_training_ms_min: float | None = None
    ort_training_peak_over_idle_bytes: int | None = None
    ort_training_error: str | None = None
    et_training_ms: float | None = None
    et_training_ms_min: float | None = None
    et_training_error: str | None = None
    compile_ms: float | None = None
    compile_ms_min: float | None = None
    compile_error: str | None = None
    compile_loss_error: float | None = None
    jax_ms: float | None = None
    jax_ms_min: float | None = None
    jax_error: str | None = None
    jax_loss_error: float | None = None
    onnxsim_ms: float | None = None
    onnxsim_ms_min: float | None = None
    onnxsim_error: str | None = None
    onnxsim_loss_error: float | None = None
    channels_last_ms: float | None = None
    channels_last_ms_min: float | None = None
    channels_last_error: str | None = None
    channels_last_loss_error: float | None = None


def measure(model: str, settings: TrainStepSettings, say: Callable[[str], None] = lambda _: None) -> StepRow:
    """Export one model's step, check it against torch, and time it. Raises ModelError or ExportError."""
    submodel = built(model, settings.options, settings.tier, settings.length)
    plain = algorithms.build("sgd", Objective.of(submodel), batch=settings.batch, **SGD)
    algorithm = stored(plain, settings.activations)
    function, form = algorithm.phases[0].function, format_of(settings.target)
    check_as_written(submodel.suffix, function.example(VERIFY_SEED)["batch.0.x"])
    with tempfile.TemporaryDirectory(prefix="edgefl-bench-") as name:
        folder = Path(name)
        say(f"{model}: exporting")
        start = time.perf_counter()
        captured, artifact, budget = compiled(function, settings.memory_budget, form)
        export_s = time.perf_counter() - start
        part = {"options": dict(settings.options), "tier": settings.tier, "length": settings.length}
        described = {"model": model, **part, "sgd": dict(SGD)}
        (folder / "job.json").write_text(json.dumps(described))
        weights = {f"weights.{name}": value.detach() for name, value in submodel.suffix.state_dict().items()}
        write_arrays(
            folder, captured, algorithm.phases[0].function, algorithm.start(weights), algorithm.hyper
        )
        write_graph(folder, captured, artifact, form.name, memory_budget=budget)
        variant, measured = "", artifact.model
        if settings.tune or not (settings.own_form or settings.memory_budget):
            verified = form.verify(function, artifact.model, VERIFY_SEED, artifact.in_place, quick=True)
            variants = form.variants(captured, artifact, verified)
            if settings.tune and variants:
                say(f"{model}: trying {len(variants) + 1} forms")
                variant, measured = take_fastest(
                    folder, measured, variants, settings.threads, settings.environment
                )
            else:
                variant = suited_form(form.name, variants, processor_features(), settings.threads)
                measured = variants.get(variant, measured)
                (folder / "graph.bin").write_bytes(measured)
        say(f"{model}: comparing with torch")
        error, rounding = _errors(function, measured, form)
        noisy = any(role_of(input) == "noise" for input in captured.inputs)
        job = Job(model, folder, submodel, settings, noisy=noisy)
        device, eager, others = _race(job, lambda text: say(f"{model}: {text}"))
    return filled(
        StepRow,
        settings,
        model=model,
        ms=device.median_ms,
        eager_ms=eager.median_ms,
        ratio=round(device.median_ms / eager.median_ms, 4),
        max_rel_error=error,
        peak_over_idle_bytes=device.peak,
        eager_peak_over_idle_bytes=eager.peak,
        ms_min=device.fastest_ms,
        eager_ms_min=eager.fastest_ms,
        steps=len(device.times),
        memory_ratio=round(device.peak / eager.peak, 4),
        export_s=round(export_s, 2),
        load_s=round(device.load_s, 4),
        artifact_bytes=len(measured),
        idle_bytes=device.idle,
        eager_idle_bytes=eager.idle,
        parameters=sum(parameter.numel() for parameter in submodel.suffix.parameters()),
        model_options=dict(settings.options),
        memory_budget=budget,
        paged_bytes=artifact.paged_bytes,
        rounding_error=rounding,
        cpu=processor(),
        variant=variant or "default",
        cpu_ms=_median(device.cpu_ms),
        eager_cpu_ms=_median(eager.cpu_ms),
        ort_training_peak_over_idle_bytes=ort.worker.peak if (ort := others["ort_training"]).worker else None,
        **_beside(others),
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


def _beside(others: Mapping[str, Outcome]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name, other in others.items():
        fields |= other.fields(name)
        if ANCHORS[name].same:
            fields[f"{name}_loss_error"] = other.loss_error
    return fields


def _median(times: list[float]) -> float:
    return round(statistics.median(times), 3)


# -- the processes ---------------------------------------------------------------------------------------------


def _race(job: Job, say: Callable[[str], None]) -> tuple[Worker, Worker, dict[str, Outcome]]:
    """The device's worker, torch's, and by name what came of the anchors."""
    threads = job.settings.threads
    device = worker(job.folder, threads)
    eager = worker_of("benchmarks.train_step.eager", job.folder, threads, threads=threads)
    others = {name: Outcome() for name in ANCHORS}
    asked = [name for name in ANCHORS if getattr(job.settings, name)]
    with running((device, eager), repr(job.model)) as stack:
        eager.run(FIRST, count=False)
        for name in (name for name in asked if not ANCHORS[name].alone):
            say(f"preparing {ANCHORS[name].title}")
            others[name] = opened(stack, name, job, eager)
        measured = [other.worker for other in others.values() if other.worker]
        take_turns([device, eager, *measured], job.settings.repeat, say)
    for name in (name for name in asked if ANCHORS[name].alone):
        say(f"{ANCHORS[name].title}, which may take minutes")
        with contextlib.ExitStack() as stack:
            others[name] = opened(stack, name, job, eager)
    return device, eager, others
