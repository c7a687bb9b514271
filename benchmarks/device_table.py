"""EmbracingFL's phone table (embracingfl.md 4.4, its Table 8): forward and backward time of a batch, for three tiers.

The comparison is width reduction at the same capacities (embracingfl.md 3.4). Forward is the multi-step
forward pass, all chunks of it, and the forward pass of the trained units; backward is the rest of a training step: a step's
time without that of a graph of the same units' forward pass in training mode, the update and the statistics included. I/O
is left out.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks.graphs import payload, worker, write_job
from benchmarks.repetition import StepWorker, run_blocks, running
from edgefl import algorithms
from edgefl.algorithms.submodels.frozen_forward import chunk_forward
from edgefl.contract.algorithm import Algorithm, Function
from edgefl.contract.tensors import Tensors, prefixed, select
from edgefl.models.spec import ModelSpec
from edgefl.models.tied import collect_state
from edgefl.models.zoo.catalog import build_model
from edgefl.objective.objective import Objective
from edgefl.objective.parts import step_ports
from edgefl.submodels import catalog
from edgefl.submodels.output_side.submodel import tiers
from edgefl.submodels.submodel import Submodel
from edgefl.wire.bundle.formats import FORMATS
from edgefl_export.compiler.compiler import check_installed, target_of
from edgefl_export.target import Target

TIERS = ("strong", "moderate", "weak")
WIDTHS: Mapping[str, float] = {"moderate": 0.45, "weak": 0.2}
"""Channels that width reduction keeps, rounded down: 7/14/28 and 3/6/12 of ResNet-20 (embracingfl.md 3.4)."""
EMBRACING, WIDTH = "EmbracingFL", "width reduction"
SGD: Mapping[str, float] = {"lr": 0.01, "momentum": 0.9, "weight_decay": 1e-4}


@dataclass(frozen=True)
class TableSettings:
    """Settings: ``steps`` timed runs of each graph in each of ``repeat`` blocks, after one that is not counted."""

    models: tuple[str, ...] = ("resnet20", "cnn")
    engines: tuple[str, ...] = FORMATS
    batch: int = 32
    steps: int = 2
    repeat: int = 5
    threads: int = 1
    options: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class DeviceTimes:
    """Milliseconds for one batch, medians."""

    engine: str
    model: str
    method: str
    tier: str
    forward_ms: float
    backward_ms: float


def measure(settings: TableSettings, say: Callable[[str], None] = lambda _: None) -> list[DeviceTimes]:
    """Measure every engine, model, method and tier.

    Raises:
        ConfigError: an engine is not installed.
        EdgeflError: a graph cannot be exported, or a process ends.
    """
    check_installed(settings.engines)
    return [
        row
        for engine in settings.engines
        for model in settings.models
        for row in _measured(engine, build_model(model, **settings.options), settings, say)
    ]


def submodels_of(spec: ModelSpec) -> dict[tuple[str, str], Submodel]:
    """Return the submodels by method and tier. The strong tier of both methods is the whole model, listed once."""
    submodels: dict[tuple[str, str], Submodel] = {}
    for tier in TIERS:
        submodels[EMBRACING, tier] = tiers(spec.name)[tier].of(spec)
        if tier in WIDTHS:
            submodels[WIDTH, tier] = catalog.build(spec, "width", ratio=WIDTHS[tier], rounding="floor")
    return submodels


def forward_only(objective: Objective, batch: int) -> Function:
    """Return the forward pass of a step of SGD: loss and statistics in training mode."""

    def fn(tensors: Tensors) -> Tensors:
        weights = select(tensors, "state.weights")
        noise, gates, facts = (select(tensors, prefix) for prefix in ("noise", "state.gate", "data"))
        params = {name: weights[name] for name in objective.trainable}
        fixed = {name: weights[name] for name in objective.fixed}
        with torch.no_grad():
            loss, correct, moved = objective(
                params, fixed, tensors["batch.0.x"], tensors["batch.0.y"], noise, gates, facts
            )
        return prefixed("state.weights", moved) | {"metric.loss": loss, "metric.correct": correct}

    return Function("forward_only", fn, step_ports(objective, batch))


def _measured(
    engine: str, spec: ModelSpec, settings: TableSettings, say: Callable[[str], None]
) -> Iterator[DeviceTimes]:
    """Run the graphs of all submodels in turns, each in a process of its own."""
    form = target_of(engine)
    submodels = submodels_of(spec)
    with tempfile.TemporaryDirectory(prefix="edgefl-bench-") as name:
        workers: dict[tuple[str, str], list[StepWorker]] = {}
        for number, (key, submodel) in enumerate(submodels.items()):
            say(f"{engine}, {spec.name}: exporting {key[0]}, {key[1]}")
            folders = _written(Path(name) / str(number), form, submodel, settings.batch)
            workers[key] = [worker(folder, settings.threads) for folder in folders]
        say(f"{engine}, {spec.name}: {sum(map(len, workers.values()))} graphs in turns")
        graphs = [each for some in workers.values() for each in some]
        with running(graphs, spec.name):
            for each in graphs:
                each.run(1, count=False)
            run_blocks(graphs, settings.repeat, settings.steps)
    for method in (EMBRACING, WIDTH):
        for tier in TIERS:
            took = workers.get((method, tier), workers[EMBRACING, tier])
            step, forward, *chunks = (statistics.median(each.times) for each in took)
            yield DeviceTimes(
                engine, spec.name, method, tier, sum(chunks) + forward, max(0.0, step - forward)
            )


def _written(folder: Path, form: Target, submodel: Submodel, batch: int) -> list[Path]:
    """Write the step, the forward pass alone, and each chunk; return their folders."""
    objective = Objective.of(submodel)
    algorithm: Algorithm = algorithms.build("sgd", objective, batch=batch, **SGD)
    weights = payload(submodel)
    left = {**weights, **algorithm.start(weights)}
    folders = [folder / "step", folder / "forward"]
    write_job(folders[0], form, algorithm.phases[0].function, left, algorithm.hyper)
    write_job(folders[1], form, forward_only(objective, batch), left, {})
    for number, chunk in enumerate(submodel.prefix, 1):
        folders.append(folder / f"chunk{number}")
        chunk_weights = prefixed("weights", collect_state(chunk.module))
        write_job(
            folders[-1], form, chunk_forward(chunk.module, chunk.sample, batch=batch), chunk_weights, {}
        )
    return folders
