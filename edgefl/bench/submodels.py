"""What each kind of submodel costs a device at matched parameter counts: bytes, memory predicted and measured, time.

Every graph of a submodel's training runs in a fresh process of its own, on the device's engine (the worker of
:mod:`edgefl.bench.train_step`): what a process needed before has no say.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from edgefl import programs
from edgefl.bench.machine import quiet_environment
from edgefl.bench.step_worker import Worker, WorkerFailed
from edgefl.models import zoo
from edgefl.models.spec import ModelSpec
from edgefl.programs.carrier import Thresholded
from edgefl.programs.contract import Function, Program, Tensors, prefixed, role_of
from edgefl.programs.objective import Objective
from edgefl.submodels import catalog
from edgefl.submodels.cost import cost, whole
from edgefl.submodels.importance.thresholds import FOUR_SIZES
from edgefl.submodels.sizes import Size, sizes
from edgefl.submodels.submodel import Submodel, extract
from edgefl.wire.blobs import describe
from edgefl.wire.errors import EdgeflError, ModelError
from edgefl.wire.limits import Limits
from edgefl.wire.manifest import Graph
from edgefl.wire.tensors import Arrays
from exporters.bundle import ports
from exporters.capture import Captured, capture
from exporters.onnx import to_onnx
from exporters.predict import predicted_peak

GAMMAS = FOUR_SIZES
BATCHES = 2
SGD: Mapping[str, float] = {"lr": 0.01, "momentum": 0.9, "weight_decay": 1e-4}


class SubmodelRow(msgspec.Struct, frozen=True, kw_only=True):
    """One kind at one size. Counts and bytes are those of :class:`edgefl.submodels.cost.Cost`.

    ``gamma`` is the share that was asked for, ``parameter_share`` the one it came to. ``artifact_bytes`` are the ONNX
    files of the training's graphs, ``step_ms`` the median training step. ``peak_over_idle_bytes`` is the measured peak
    of a training step over the idle process, ``predicted_bytes`` what `edgefl plan` expects of it and
    ``prediction_error`` their relative difference; ``round_*`` is the largest of all the training's graphs.
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
    model: str
    program: str
    batch: int
    size: str
    options: dict[str, Any]


@dataclass(frozen=True)
class Settings:
    """What is measured: ``steps`` training steps, after one that is not counted."""

    batch: int = 32
    steps: int = 5
    threads: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Run:
    """One graph: what it was expected to need, what it took."""

    graph: str
    predicted: int
    peak: int
    artifact: int
    ms: float


def matched(spec: ModelSpec, kind: str, gamma: float) -> Size:
    """The size of ``kind`` whose trained parameters are nearest to the ``gamma`` share of the model's.

    A kind that takes gamma is asked for it. ModelError for a gamma outside (0, 1].
    """
    if not 0.0 < gamma <= 1.0:
        raise ModelError(f"gamma lies in (0, 1], found {gamma}", gamma=gamma)
    found = sizes(spec, [kind], [gamma])
    if len(found) == 1:
        return found[0]
    target = gamma * whole(spec)[0]

    def off(size: Size) -> float:
        return abs(sum(p.numel() for p in size.of(spec).suffix.parameters() if p.requires_grad) - target)

    return min(found, key=off)


def kinds_of(spec: ModelSpec) -> tuple[str, ...]:
    """The kinds that this model can be cut into."""
    return tuple(kind for kind in catalog.KINDS if _exists(spec, kind))


def _exists(spec: ModelSpec, kind: str) -> bool:
    try:
        sizes(spec, [kind], [1.0])[0].of(spec)
    except ModelError:
        return False
    return True


def build(model: str, settings: Settings) -> ModelSpec:
    """The model with initial weights; ModelError if there is none of this name."""
    return zoo.build(model, **settings.options)


def measure(
    spec: ModelSpec, kind: str, gamma: float, settings: Settings, say: Callable[[str], None] = lambda _: None
) -> SubmodelRow:
    """One row. ConfigError, ModelError or ExportError where there is no such submodel; EdgeflError if a worker ends."""
    size = matched(spec, kind, gamma)
    submodel = size.of(spec)
    name = "tcbgd" if isinstance(submodel.carrier, Thresholded) else "sgd"
    program = programs.build(name, Objective.of(submodel), batch=settings.batch, **SGD)
    done = list(runs(program, submodel, settings, lambda text: say(f"{kind}, {size.label}: {text}")))
    [step] = [run for run in done if run.graph == program.phases[0].function.name]
    highest = max(done, key=lambda run: run.peak)
    found, (parameters, macs) = cost(submodel), whole(spec)
    return SubmodelRow(
        kind=kind,
        gamma=gamma,
        parameters=found.parameters,
        macs=found.macs,
        download_bytes=found.download_bytes,
        upload_bytes=found.upload_bytes,
        artifact_bytes=sum(run.artifact for run in done),
        peak_over_idle_bytes=step.peak,
        step_ms=step.ms,
        predicted_bytes=step.predicted,
        prediction_error=round(step.predicted / step.peak - 1, 4),
        round_peak_bytes=highest.peak,
        round_predicted_bytes=max(run.predicted for run in done),
        round_graph=highest.graph,
        parameter_share=round(found.parameters / parameters, 6),
        kept_macs=found.kept_macs,
        mac_share=round(found.kept_macs / max(1, macs), 6),
        prefix_macs=found.prefix_macs,
        model=spec.name,
        program=name,
        batch=settings.batch,
        size=size.label,
        options=dict(size.options),
    )


def runs(
    program: Program, submodel: Submodel, settings: Settings, say: Callable[[str], None]
) -> Iterator[Run]:
    """Start, step and finish, each in a process of its own, with what the one before left."""
    weights = _payload(submodel)
    state = program.start(weights)
    for function in (program.start, program.phases[0].function, program.finish):
        say(f"graph {function.name}")
        captured = capture(function)
        artifact = to_onnx(captured)
        again = any(role_of(name) == "batch" for name in function.inputs)
        with tempfile.TemporaryDirectory(prefix="edgefl-bench-") as folder:
            _write_graph(Path(folder), captured, artifact)
            _write_arrays(Path(folder), captured, function, {**weights, **state}, program.hyper)
            worker = _trained(Path(folder), settings, settings.steps if again else 0)
        yield Run(
            function.name,
            predicted_peak(captured),
            worker.peak,
            len(artifact),
            round(statistics.median(worker.times), 3) if worker.times else 0.0,
        )


def _payload(submodel: Submodel) -> Tensors:
    """What ``start`` reads in round 1: the tier's payload, or the units' tensors."""
    weights = {name: tensor.numpy() for name, tensor in submodel.spec.weights.items()}
    placement = submodel.place(weights, 1)
    arrays = placement.payload or extract(weights, placement.regions)
    return prefixed("weights", {name: torch.from_numpy(np.array(array)) for name, array in arrays.items()})


def _trained(folder: Path, settings: Settings, steps: int) -> Worker:
    """The worker after one run that is not counted, and ``steps`` more."""
    environment = quiet_environment() | {"OMP_NUM_THREADS": str(settings.threads)}
    command = [sys.executable, "-m", "edgefl.bench.step_device", str(folder), str(settings.threads)]
    try:
        with Worker(command, environment) as worker:
            worker.run(1, count=False)
            if steps:
                worker.run(steps)
    except WorkerFailed as error:
        raise EdgeflError(f"a process that measures a submodel ended: {error}", log=error.log) from error
    return worker


def _write_graph(folder: Path, captured: Captured, artifact: bytes) -> None:
    graph = Graph(
        name=captured.name,
        format="onnx",
        blob=describe(artifact, Limits().chunk_bytes),
        inputs=ports(captured.inputs),
        outputs=ports(captured.outputs),
    )
    (folder / "graph.msgpack").write_bytes(msgspec.msgpack.encode(graph))
    (folder / "graph.onnx").write_bytes(artifact)


def _write_arrays(
    folder: Path, captured: Captured, function: Function, left: Tensors, hyper: Mapping[str, float]
) -> None:
    """State, and what the runs read beside it: two batches in turn, or the weights of a graph that runs once."""
    given = {name: left[name].numpy() for name in captured.inputs if name in left}
    state = {name: array for name, array in given.items() if role_of(name) == "state"}
    np.savez(folder / "state.npz", **state)  # type: ignore[arg-type]
    batches = any(role_of(name) == "batch" for name in captured.inputs)
    for seed in range(BATCHES if batches else 1):
        read: Arrays = {name: array for name, array in given.items() if role_of(name) == "weights"}
        example = function.example(seed)
        read |= {name: example[name].numpy() for name in captured.inputs if role_of(name) == "batch"}
        read |= {f"hyper.{name}": np.asarray(value, np.float32) for name, value in hyper.items()}
        np.savez(folder / f"batch{seed}.npz", **read)  # type: ignore[arg-type]
