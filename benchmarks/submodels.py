"""``python -m benchmarks submodels``: cost of each kind of submodel on a device at matched parameter counts.

Every graph of a submodel's training runs in a fresh process on the device's engine, so that earlier graphs do not count.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import typer

from benchmarks.graphs import payload, worker, write_arrays, write_graph
from benchmarks.options import EngineThreads, Json, ZooModel, check_choice
from benchmarks.repetition import StepWorker, running
from benchmarks.results import bench, mebibytes
from edgefl import algorithms
from edgefl.algorithms.submodels.frozen_forward import chunk_forward
from edgefl.cli.models.plan import gammas
from edgefl.cli.options import ModelOptions
from edgefl.config.names import check_kinds
from edgefl.contract.algorithm import Algorithm, Function
from edgefl.contract.tensors import Tensors, prefixed, role_of
from edgefl.errors import ModelError
from edgefl.models.spec import ModelSpec
from edgefl.models.tied import collect_state
from edgefl.models.zoo.catalog import build_model
from edgefl.objective.carrier import ThresholdCarrier
from edgefl.objective.objective import Objective
from edgefl.setup.federation_options import parse_options
from edgefl.submodels import catalog
from edgefl.submodels.catalog import SubmodelSize, sizes
from edgefl.submodels.cost import cost, model_cost
from edgefl.submodels.importance.thresholds import FOUR_SIZES
from edgefl.submodels.submodel import Submodel
from edgefl.system.structs import filled
from edgefl_export.artifact import Artifact
from edgefl_export.memory.predict import predicted_peak
from edgefl_export.memory.recompute import lean
from edgefl_export.memory.usage import rewritable
from edgefl_export.onnx.model import to_onnx
from edgefl_export.onnx.target import OnnxTarget

GAMMAS = FOUR_SIZES
Match = Literal["parameters", "macs"]
FORWARD_BATCH = 32
"""Rows per group in the server's export of a frozen forward pass."""
SGD: Mapping[str, float] = {"lr": 0.01, "momentum": 0.9, "weight_decay": 1e-4}


@dataclass(frozen=True)
class SubmodelSettings:
    """Settings of the benchmark: ``steps`` training steps, after one that is not counted."""

    batch: int = 32
    steps: int = 5
    threads: int = 1
    match: Match = "parameters"


class SubmodelRow(msgspec.Struct, frozen=True, kw_only=True):
    """One kind at one size. Counts and bytes come from :class:`edgefl.submodels.cost.RoundCost`.

    Attributes:
        gamma: requested share of the parameters or (``match``) of the multiplications.
        parameter_share, mac_share: shares of the submodel.
        artifact_bytes: ONNX files of the training's graphs.
        step_ms: median training step.
        peak_over_idle_bytes: measured peak of a training step over the idle process.
        predicted_bytes: predicted peak; `edgefl plan` adds the memory of a round beside its graph.
        prediction_error: relative error of the prediction.
        round_peak_bytes, round_predicted_bytes, round_graph: the largest of all graphs of a round, with the forward
            passes of the frozen chunks (32 rows at once). The chunks are as fine as those of `edgefl plan` (``size``).
    """

    kind: str
    gamma: float
    parameters: int
    macs: int
    download_bytes: int
    upload_bytes: int
    artifact_bytes: int
    peak_over_idle_bytes: int
    step_ms: float
    predicted_bytes: int
    prediction_error: float
    round_peak_bytes: int
    round_predicted_bytes: int
    round_graph: str
    parameter_share: float
    kept_macs: int
    mac_share: float
    prefix_macs: int
    match: str
    model: str
    algorithm: str
    batch: int
    size: str
    options: dict[str, Any]


def submodels(
    model: ZooModel = "resnet18",
    kind: Annotated[
        list[str] | None, typer.Option(help="a kind of submodel, may be repeated; default: all")
    ] = None,
    gamma: Annotated[
        list[str] | None, typer.Option(help="sizes like 1/16 or 0.25, may be repeated; default: 1/64 to 1")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="samples per step")] = 32,
    match: Annotated[
        Match, typer.Option(help="what a size is a share of, for all kinds alike")
    ] = "parameters",
    steps: Annotated[int, typer.Option(min=1, help="steps that are timed, after one that is not")] = 5,
    threads: EngineThreads = 1,
    option: ModelOptions = None,
    as_json: Json = False,
) -> None:
    """Measure the cost of each kind of submodel on a device, at matched parameter counts.

    For each kind and gamma: parameters, MACs, bytes down and up, and on the device's engine, in fresh processes, the peak
    memory and the time of a training step, beside the prediction of `edgefl plan`. A kind without gamma takes the cut
    whose parameters are nearest. ResNet-18 takes some ten minutes; each row is printed to stderr as soon as it is measured.

    Examples:

      python -m benchmarks submodels --json

      python -m benchmarks submodels --model resnet20 --kind width --kind importance --gamma 0.25 --steps 3
    """

    shares = gammas(gamma or ())
    check_kinds(kind or ())
    check_choice([model], option or ())

    settings = SubmodelSettings(batch=batch, steps=steps, threads=threads, match=match)
    spec = build_model(model, **parse_options(option or ()))
    bench(
        "submodels",
        f"submodels of {model}: batch {batch}",
        list(product(kind or kinds_of(spec), shares or GAMMAS)),
        lambda case, say: measure(spec, *case, settings, lambda text: say(f"{model}: {text}")),
        _submodel_columns,
        as_json,
    )


def _submodel_columns(row: SubmodelRow) -> dict[str, Any]:
    return {
        "submodel": f"{row.kind}, {row.size}",
        "params": f"{row.parameter_share:.1%}",
        "MMAC": f"{row.macs / 1e6:,.1f}",
        "MB down": f"{row.download_bytes / 1e6:.2f}",
        "MB up": f"{row.upload_bytes / 1e6:.2f}",
        "MiB": mebibytes(row.peak_over_idle_bytes),
        "predicted": f"{row.prediction_error:+.0%}",
        "ms": row.step_ms,
    }


_LEAST_GAMMA, _HALVINGS = 1e-5, 12


@dataclass(frozen=True)
class GraphRun:
    """Predicted and measured peak of one graph, the bytes of its artifact and its time."""

    graph: str
    predicted: int
    peak: int
    artifact: int
    ms: float


def matched(spec: ModelSpec, kind: str, gamma: float, match: Match = "parameters") -> SubmodelSize:
    """Return the size of ``kind`` whose trained parameters, or kept multiplications, are nearest to a share of the model's.

    For a kind with an option ``gamma``, parameters take its value, and multiplications search for it.

    Raises:
        ModelError: gamma lies outside (0, 1].
    """
    if not 0.0 < gamma <= 1.0:
        raise ModelError(f"gamma lies in (0, 1], found {gamma}", gamma=gamma)
    candidates = sizes(spec, [kind], [gamma])
    by_gamma = len(candidates) == 1 and "gamma" in candidates[0].options
    if len(candidates) == 1 and (match == "parameters" or gamma == 1.0 or not by_gamma):
        return candidates[0]
    parameters, macs = model_cost(spec)
    if by_gamma:
        return _searched(spec, candidates[0], gamma * macs)
    target = gamma * (parameters if match == "parameters" else macs)

    def off(size: SubmodelSize) -> float:
        cost_of = cost(size.of(spec))
        return abs((cost_of.parameters if match == "parameters" else cost_of.kept_macs) - target)

    return min(candidates, key=off)


def _searched(spec: ModelSpec, size: SubmodelSize, macs: float) -> SubmodelSize:
    """Return ``size`` with the gamma whose kept multiplications are nearest to ``macs``, by bisection of its logarithm."""
    low, high = math.log(_LEAST_GAMMA), 0.0
    tried: list[tuple[float, SubmodelSize]] = []
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        candidate = SubmodelSize(size.kind, {**size.options, "gamma": round(math.exp(middle), 6)})
        try:
            multiplications = cost(candidate.of(spec)).kept_macs
        except ModelError:  # smaller than any submodel of this kind
            low = middle
            continue
        tried.append((abs(multiplications - macs), candidate))
        low, high = (middle, high) if multiplications < macs else (low, middle)
    if not tried:
        raise ModelError(
            f"no {size.kind} of {spec.name} has as few as {macs:,.0f} multiplications", kind=size.kind
        )
    return min(tried, key=lambda item: item[0])[1]


def kinds_of(spec: ModelSpec) -> tuple[str, ...]:
    """Return the kinds of submodels that this model has."""
    return tuple(kind for kind in catalog.KINDS if _exists(spec, kind))


def _exists(spec: ModelSpec, kind: str) -> bool:
    try:
        sizes(spec, [kind], [1.0])[0].of(spec)
    except ModelError:
        return False
    return True


def measure(
    spec: ModelSpec,
    kind: str,
    gamma: float,
    settings: SubmodelSettings,
    say: Callable[[str], None] = lambda _: None,
) -> SubmodelRow:
    """Measure one kind at one size.

    Raises:
        ConfigError, ModelError, ExportError: there is no such submodel.
        EdgeflError: a worker ended.
    """
    size = matched(spec, kind, gamma, settings.match)
    submodel = size.of(spec)
    name = "tcbgd" if isinstance(submodel.carrier, ThresholdCarrier) else "sgd"
    algorithm = algorithms.build(name, Objective.of(submodel), batch=settings.batch, **SGD)
    done = list(runs(algorithm, submodel, settings, lambda text: say(f"{kind}, {size.label}: {text}")))
    [step] = [run for run in done if run.graph == algorithm.phases[0].function.name]
    artifact = sum(run.artifact for run in done)
    size = _chunked(size, spec, max(run.predicted for run in done))
    submodel = size.of(spec)
    done += forward_runs(submodel, settings, lambda text: say(f"{kind}, {size.label}: {text}"))
    highest = max(done, key=lambda run: run.peak)
    submodel_cost, (parameters, macs) = cost(submodel), model_cost(spec)
    return filled(
        SubmodelRow,
        submodel_cost,
        settings,
        kind=kind,
        gamma=gamma,
        artifact_bytes=artifact,
        peak_over_idle_bytes=step.peak,
        step_ms=step.ms,
        predicted_bytes=step.predicted,
        prediction_error=round(step.predicted / step.peak - 1, 4),
        round_peak_bytes=highest.peak,
        round_predicted_bytes=max(run.predicted for run in done),
        round_graph=highest.graph,
        parameter_share=round(submodel_cost.parameters / parameters, 6),
        mac_share=round(submodel_cost.kept_macs / max(1, macs), 6),
        model=spec.name,
        algorithm=name,
        size=size.label,
        options=dict(size.options),
    )


def runs(
    algorithm: Algorithm, submodel: Submodel, settings: SubmodelSettings, say: Callable[[str], None]
) -> Iterator[GraphRun]:
    """Run start, step and finish, each in a process of its own, with the state after ``start``."""
    weights = payload(submodel)
    left = {**weights, **algorithm.start(weights)}
    for function in (algorithm.start, algorithm.phases[0].function, algorithm.finish):
        say(f"graph {function.name}")
        yield _run(function, left, algorithm.hyper, settings)


def forward_runs(
    submodel: Submodel, settings: SubmodelSettings, say: Callable[[str], None]
) -> Iterator[GraphRun]:
    """Run the forward pass of each frozen chunk, each in a process of its own."""
    for chunk, function in zip(submodel.prefix, _forwards(submodel), strict=True):
        say(f"graph {function.name} of {', '.join(chunk.units)}")
        yield _run(function, prefixed("weights", collect_state(chunk.module)), {}, settings)


def _forwards(submodel: Submodel) -> list[Function]:
    return [chunk_forward(chunk.module, chunk.sample, batch=FORWARD_BATCH) for chunk in submodel.prefix]


def _chunked(size: SubmodelSize, spec: ModelSpec, training: int) -> SubmodelSize:
    """Return ``size`` with finer chunks if its chunks need more than the ``training`` bytes, as in `edgefl plan`."""
    if size.finer is None:
        return size
    forward = max(predicted_peak(OnnxTarget().capture(function)) for function in _forwards(size.of(spec)))
    return size.finer if forward > training else size


def _run(
    function: Function, left: Tensors, hyper: Mapping[str, float], settings: SubmodelSettings
) -> GraphRun:
    """Run ``function`` in a fresh process on the tensors ``left``; for some steps if it reads batches."""
    captured = lean(OnnxTarget().capture(function))
    artifact = Artifact(to_onnx(captured), in_place=rewritable(captured))
    again = any(role_of(name) == "batch" for name in function.inputs)
    with tempfile.TemporaryDirectory(prefix="edgefl-bench-") as folder:
        write_graph(Path(folder), captured, artifact, "onnx")
        write_arrays(Path(folder), captured, function, left, hyper)
        ran = _trained(Path(folder), settings, settings.steps if again else 0)
    return GraphRun(
        function.name,
        predicted_peak(captured),
        ran.anonymous,
        len(artifact.model),
        ran.median_ms if ran.times else 0.0,
    )


def _trained(folder: Path, settings: SubmodelSettings, steps: int) -> StepWorker:
    """Return the worker after one run that is not counted, and ``steps`` more."""
    process = worker(folder, settings.threads)
    with running([process], "a submodel"):
        process.run(1, count=False)
        if steps:
            process.run(steps)
    return process
