"""``python -m benchmarks train-step``: an exported training step on the device's engine beside torch eager and baselines."""

from __future__ import annotations

import contextlib
import json
import math
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from benchmarks.graphs import worker, write_arrays, write_graph
from benchmarks.machine import processor
from benchmarks.options import Json, check_choice, python_option, with_options
from benchmarks.repetition import StepWorker, median, ratio, running, take_turns, worker_of
from benchmarks.results import measured, mebibytes, print_rows
from benchmarks.torch_layers import check_torch_layers
from benchmarks.train_step.baselines import (
    BASELINES,
    FIRST,
    BaselineResult,
    RaceJob,
    TrainStepSettings,
    open_baseline,
)
from benchmarks.train_step.eager import built
from benchmarks.train_step.tuning import take_fastest
from edgefl import algorithms
from edgefl.algorithms.activations import store_activations
from edgefl.cli.options import ActivationsOption, EngineChoice, ModelOptions, parse_memory_budget
from edgefl.cli.output import errors, print_table
from edgefl.contract.algorithm import Function
from edgefl.contract.tensors import role_of
from edgefl.errors import ConfigError, ExportError
from edgefl.objective.objective import Objective
from edgefl.setup.federation_options import parse_options
from edgefl.system.sizes import size
from edgefl.system.structs import filled
from edgefl_device.host import processor_features
from edgefl_device.round.autotune import suited_variant
from edgefl_export.artifact import Artifact, is_page
from edgefl_export.capture.graph import LoweredGraph
from edgefl_export.compiler.compiler import target_of
from edgefl_export.memory.recompute import Budget
from edgefl_export.target import Target

MODELS = ("resnet20", "resnet18", "cnn", "mobilenet", "bert", "vit", "bilstm", "lstm_lm")
SGD: Mapping[str, float] = {"lr": 0.01, "momentum": 0.9, "weight_decay": 1e-4}
VERIFY_SEED = 0


@dataclass(frozen=True)
class TrainStepOptions:
    """Options of the command."""

    model: Annotated[
        list[str] | None, typer.Option(help="a model of `edgefl ls models`, may be repeated; default: eight")
    ] = None
    batch: Annotated[int, typer.Option(min=1, help="samples per step")] = 32
    target: Annotated[EngineChoice, typer.Option(help="what is exported and measured")] = EngineChoice.onnx
    threads: Annotated[int, typer.Option(min=1, help="threads of every engine; a device's default is 1")] = 1
    repeat: Annotated[int, typer.Option(min=1, help="blocks of steps per engine")] = 5
    tier: Annotated[str, typer.Option(help="the part that is trained; strong is all")] = "strong"
    lengths: Annotated[
        str, typer.Option(metavar="N,N", help="of sequences: the model's is the largest, and a row for each")
    ] = ""
    option: ModelOptions = None
    ort_training: Annotated[
        str,
        python_option("interpreter of an environment with onnxruntime-training"),
    ] = ""
    et_training: Annotated[
        bool,
        typer.Option("--et-training", help="ExecuTorch's own training export too; takes minutes"),
    ] = False
    jax: Annotated[
        str,
        python_option("interpreter of an environment with JAX"),
    ] = ""
    onnxsim: Annotated[
        str,
        python_option("interpreter of an environment with onnxsim and onnxruntime"),
    ] = ""
    compile: Annotated[
        bool, typer.Option("--compile", help="torch.compile too; needs g++, takes minutes to compile")
    ] = False
    channels_last: Annotated[
        bool, typer.Option("--channels-last", help="torch eager on images with channels last too")
    ] = False
    tune: Annotated[
        bool, typer.Option("--tune", help="try the variants of the step first, and measure the fastest form")
    ] = False
    own_form: Annotated[
        bool, typer.Option("--own-form", help="the form that any ONNX runtime runs, not the processor's")
    ] = False
    memory_budget: Annotated[
        str,
        typer.Option(
            metavar="SIZE|PERCENT,...",
            help="as of `edgefl export`, like 64MiB; % of what is estimated without; a row for each",
        ),
    ] = ""
    activations: Annotated[
        ActivationsOption, typer.Option(help="as of `edgefl export`: how values wait for the backward pass")
    ] = ActivationsOption.float32
    as_json: Json = False

    def check(self) -> None:
        """Raise ConfigError for names, lengths or budgets that cannot be."""
        parse_lengths(self.lengths)
        for part in self.memory_budget.split(","):
            parse_memory_budget(part.strip())
        check_choice(self.model or (), self.option or (), tiers=(self.tier,))

    def cases(self) -> list[tuple[str, TrainStepSettings]]:
        """Return (model, settings) for each row."""
        lengths = parse_lengths(self.lengths)
        settings = TrainStepSettings(
            batch=self.batch,
            target=self.target.value,
            threads=self.threads,
            repeat=self.repeat,
            tier=self.tier,
            options=parse_options(self.option or ()) | ({"length": lengths[-1]} if lengths else {}),
            ort_training=self.ort_training,
            et_training=self.et_training,
            jax=self.jax,
            onnxsim=self.onnxsim,
            compile=self.compile,
            channels_last=self.channels_last,
            tune=self.tune,
            own_form=self.own_form,
            activations=self.activations.value,
        )
        budgets: list[Budget | None] = [None]
        if self.memory_budget:
            budgets = [Budget.parse(text.strip()) for text in self.memory_budget.split(",")]
        return [
            (model, replace(settings, length=length, memory_budget=budget))
            for model, length, budget in product(self.model or MODELS, [*lengths[:-1], 0], budgets)
        ]


class StepRow(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds per step, medians (and minima) over all counted steps; bytes of resident memory over idle.

    Fields with the name of a baseline are null unless it was requested and ran; ``..._error`` has its problem. ExecuTorch's
    training export computes loss and gradients only. ``..._loss_error`` is the largest relative difference between the first
    losses and torch eager's, null for a model that draws noise.

    Attributes:
        ratio: ``ms / eager_ms``.
        max_rel_error: worst output of one step beside torch, over loss, new weights, momentum and statistics. If rounding
            decides (kinks of deep models), it is beside float64.
        rounding_error: torch's own error beside float64 in that case; null elsewhere.
        load_s: time until the device can run the graph.
        length: tokens of a sample that is shorter than the model's.
        memory_budget: bytes that the step was compiled for (0: none).
        paged_bytes: bytes that a step writes to the disk and reads again.
        activations: type of the values that wait for the backward pass.
        cpu: name of the processor.
        cpu_ms: processor time of all threads for a step, threads that spin included.
        variant: form of the graph.
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


@with_options(TrainStepOptions)
def train_step(options: TrainStepOptions) -> None:
    """One training step: an exported graph on the device's engine beside torch eager.

    Each engine trains in a fresh process, in turns with the others, in blocks of equally many steps. Torch's side is the
    usual code: torch's own layers, `backward`, `torch.optim.SGD`. Times are medians and minima over all counted steps.
    Memory is the peak of resident memory over the same process with its library imported and nothing run: libraries that
    torch or onnxruntime load on first use belong to the training. Each model's row is printed to stderr as soon as it is
    measured. The retired onnxruntime-training needs an environment of its own: `python -m benchmarks peer ort-training`
    makes one and prints its interpreter.

    The step has the form that suits the processor's instruction sets, as in `edgefl.train_round`: `variant` names it. With
    `--tune` all forms of the exporter for this engine are tried first, as on a device (`edgefl tune`), and the fastest is
    measured. `--own-form` measures the one that any ONNX runtime runs.

    `--compile` also measures torch.compile of the same step, which needs g++ (or the compiler in CXX) and compiles for
    minutes; `--channels-last` measures torch eager with images in that layout; `--jax` the step of a convolutional network
    in JAX, in an environment that `python -m benchmarks peer jax` makes; `--onnxsim` onnxsim's training loop, which has
    gradients for few graphs. The first losses of a model without dropout are compared with torch eager's
    (`*_loss_error`). A failure is reported in the row (`*_error`) and ends nothing.

    `--et-training` adds ExecuTorch's own, experimental training export (loss and gradients only). It takes minutes to export
    and, with convolutions, many seconds a step, of which two are timed after the others.

    Examples:

      python -m benchmarks train-step --model resnet20 --batch 32

      python -m benchmarks train-step --model resnet20 --memory-budget 90%,50%

    Sequences of several lengths:

      python -m benchmarks train-step --model bert --lengths 16,64,128      (what a padded batch costs by its bucket)

    ExecuTorch:

      python -m benchmarks train-step --model resnet20 --target executorch --json

      python -m benchmarks train-step --model resnet20 --target executorch --et-training --json

    Other libraries:

      python -m benchmarks train-step --model resnet20 --model cnn --compile --channels-last --json

      python -m benchmarks train-step --model resnet20 --model cnn --jax "$(python -m benchmarks peer jax)"

    The retired onnxruntime-training:

      python -m benchmarks train-step --model cnn --model bert --ort-training "$(python -m benchmarks peer ort-training)"
    """

    options.check()
    rows, failed = measured(options.cases(), lambda case, say: measure(*case, say), step_columns)
    for row, (name, baseline) in product(rows, BASELINES.items()):
        if problem := getattr(row, f"{name}_error"):
            errors.print(f"{row.model}: {baseline.title} did not run: {problem}", style="yellow")
    if options.as_json:
        print_rows("train-step", rows, options.as_json)
    else:
        title = f"train-step: batch {options.batch}, threads {options.threads}"
        print_table(title, [step_columns(row) for row in rows], _caption(rows))
        if others := baseline_rows(rows):
            print_table("beside torch eager", others)
    if failed:
        raise typer.Exit(failed[0].exit_code)


def step_columns(row: StepRow) -> dict[str, Any]:
    return {
        "model": _name(row) + (f", {row.variant}" if row.variant != "default" else ""),
        "ms": row.ms,
        "eager ms": row.eager_ms,
        "ratio": f"{row.ratio:.2f}",
        "error": f"{row.max_rel_error:.0e}",
        "memory MiB": mebibytes(row.peak_over_idle_bytes),
        "eager MiB": mebibytes(row.eager_peak_over_idle_bytes),
    }


def baseline_rows(rows: Sequence[StepRow]) -> list[dict[str, Any]]:
    """Return a row for each baseline that ran."""
    return [
        {
            "model": _name(row),
            "beside": title,
            "ms": ms,
            "fastest ms": getattr(row, f"{name}_ms_min"),
            "of eager": f"{ms / row.eager_ms:.2f}",
        }
        for row, (name, title) in product(rows, _BESIDE.items())
        if (ms := getattr(row, f"{name}_ms")) is not None
    ]


def measure(model: str, settings: TrainStepSettings, say: Callable[[str], None] = lambda _: None) -> StepRow:
    """Export one model's step, compare it with torch, and time it.

    Raises:
        ModelError: there is no such model or tier.
        ExportError: the step cannot be exported.
    """
    submodel = built(model, settings.options, settings.tier, settings.length)
    plain = algorithms.build("sgd", Objective.of(submodel), batch=settings.batch, **SGD)
    algorithm = store_activations(plain, settings.activations)
    function, form = algorithm.phases[0].function, target_of(settings.target)
    check_torch_layers(submodel.suffix, function.example(VERIFY_SEED)["batch.0.x"])
    with tempfile.TemporaryDirectory(prefix="edgefl-bench-") as name:
        folder = Path(name)
        say(f"{model}: exporting")
        start = time.perf_counter()
        captured, artifact, budget = compile_step(function, settings.memory_budget, form)
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
                variant = suited_variant(form.name, variants, processor_features(), settings.threads)
                measured = variants.get(variant, measured)
                (folder / "graph.bin").write_bytes(measured)
        say(f"{model}: comparing with torch")
        error, rounding = _errors(function, measured, form)
        noisy = any(role_of(input) == "noise" for input in captured.inputs)
        job = RaceJob(model, folder, submodel, settings, noisy=noisy)
        device, eager, others = _race(job, lambda text: say(f"{model}: {text}"))
    return filled(
        StepRow,
        settings,
        model=model,
        ms=device.median_ms,
        eager_ms=eager.median_ms,
        ratio=ratio(device.median_ms, eager.median_ms),
        max_rel_error=error,
        peak_over_idle_bytes=device.peak,
        eager_peak_over_idle_bytes=eager.peak,
        ms_min=device.fastest_ms,
        eager_ms_min=eager.fastest_ms,
        steps=len(device.times),
        memory_ratio=ratio(device.peak, eager.peak),
        export_s=round(export_s, 2),
        load_s=round(device.load_s, 4),
        artifact_bytes=len(measured),
        idle_bytes=device.idle,
        eager_idle_bytes=eager.idle,
        parameters=sum(parameter.numel() for parameter in submodel.suffix.parameters()),
        model_options=dict(settings.options),
        memory_budget=budget,
        paged_bytes=paged_bytes(artifact),
        rounding_error=rounding,
        cpu=processor(),
        variant=variant or "default",
        cpu_ms=median(device.cpu_ms),
        eager_cpu_ms=median(eager.cpu_ms),
        ort_training_peak_over_idle_bytes=ort.worker.peak if (ort := others["ort_training"]).worker else None,
        **{field: value for name, other in others.items() for field, value in other.fields(name).items()},
    )


def compile_step(
    function: Function, wanted: Budget | None, form: Target
) -> tuple[LoweredGraph, Artifact, int]:
    """Return the captured step, its artifact, and its memory budget in bytes (0: none)."""
    lowered = form.capture(function)
    artifact = form.emit(lowered, wanted)
    return lowered, artifact, artifact.memory_budget


def _errors(function: Function, model: bytes, form: Target) -> tuple[float, float | None]:
    """Return the largest relative error of an output, and torch's own if rounding decides.

    An error beyond the tolerance is reported in the row, instead of a failure without a row.
    """
    try:
        report = form.verify(function, model, VERIFY_SEED)
    except ExportError as error:
        worst = error.details.get("worst")
        if not isinstance(worst, float) or not math.isfinite(worst):
            raise
        return worst, None
    return report.worst, max(report.rounding.values(), default=None)


def _race(
    job: RaceJob, say: Callable[[str], None]
) -> tuple[StepWorker, StepWorker, dict[str, BaselineResult]]:
    """Run all engines in turns; return the device's worker, torch's, and the baselines by name."""
    threads = job.settings.threads
    device = worker(job.folder, threads)
    eager = worker_of("benchmarks.train_step.eager", job.folder, threads, threads=threads)
    others = {name: BaselineResult() for name in BASELINES}
    asked = [name for name in BASELINES if getattr(job.settings, name)]
    with running((device, eager), repr(job.model)) as stack:
        eager.run(FIRST, count=False)
        for name in (name for name in asked if not BASELINES[name].alone):
            say(f"preparing {BASELINES[name].title}")
            others[name] = open_baseline(stack, name, job, eager)
        measured = [other.worker for other in others.values() if other.worker]
        take_turns([device, eager, *measured], job.settings.repeat, say)
    for name in (name for name in asked if BASELINES[name].alone):
        say(f"{BASELINES[name].title}, which may take minutes")
        with contextlib.ExitStack() as stack:
            others[name] = open_baseline(stack, name, job, eager)
    return device, eager, others


def parse_lengths(text: str) -> list[int]:
    """Parse ``16,64,128``; return the lengths ascending. The largest is the model's own, the others are shortened."""

    try:
        lengths = sorted({int(part) for part in text.split(",") if part.strip()})
    except ValueError as error:
        raise ConfigError(f"--lengths expects whole numbers such as 16,64,128, found {text!r}") from error
    if lengths and lengths[0] < 1:
        raise ConfigError(f"--lengths expects numbers of at least 1, found {lengths[0]}")
    return lengths


_BESIDE = {
    "ort_training": "ort training",
    "et_training": "et training",
    "compile": "compile",
    "jax": "JAX",
    "onnxsim": "onnxsim",
    "channels_last": "channels last",
}


def _name(row: StepRow) -> str:
    budget = f", {size(row.memory_budget)}" if row.memory_budget else ""
    return (f"{row.model}, {row.length} tokens" if row.length else row.model) + budget


def _caption(rows: Sequence[StepRow]) -> str:
    exports = ", ".join(f"{row.model} {size(row.artifact_bytes)} in {row.export_s:.0f} s" for row in rows)
    return f"exported: {exports}" if rows else ""


def paged_bytes(artifact: Artifact) -> int:
    """Return the bytes of the pages that the segments of one call write to disk for later segments; 0 without segments."""
    pages = {
        name: spec for segment in artifact.segments for name, spec in segment.outputs.items() if is_page(name)
    }
    return sum(math.prod(spec.shape) * spec.dtype.itemsize for spec in pages.values())
