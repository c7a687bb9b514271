"""``python -m benchmarks memory``: peak memory of an agent in training over the same agent idle, by engine and tier."""

from __future__ import annotations

import contextlib
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from benchmarks.federations import events_of, lab_of
from benchmarks.options import Json, check_choice
from benchmarks.repetition import run_blocks, running, worker_of
from benchmarks.results import report
from edgefl.api.progress import reporting
from edgefl.cli.options import Engines, OutputsMode
from edgefl.cli.output import errors
from edgefl.config import Federation, parse
from edgefl.data.dataset import Dataset
from edgefl.setup.data import open_data
from edgefl.setup.model import federation_model
from edgefl.setup.tiers import completed
from edgefl.setup.training import tier_of
from edgefl.wire.bundle.archive import read_bundle

SAMPLES_PER_DEVICE = 390
"""Mean client size of the paper (embracingfl.md, section 3.5); it decides the size of the record."""
TURNS, TURN_STEPS = 5, 4
_NAMES = {"onnx": "onnxruntime", "executorch": "executorch"}


class MemoryRow(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of anonymous memory in the agent's own process; medians over repetitions. Times in milliseconds.

    Attributes:
        outputs: memory that holds a program's outputs, ``caller`` or ``planned``.
        predicted_bytes: plan of a round.
        predicted_error: its relative error against the measured memory; null if the bundle has no plan.
        step_ms: median step of a round, while the agents of all tiers share the machine.
        fastest_step_ms: fastest reported step.
        time_ratio: fastest step of the same graph in a process of its own, over the one without our measures for memory
            (:mod:`benchmarks.workers.bundle`), in turns. On ExecuTorch that is a program that keeps all activations.
    """

    engine: str
    outputs: str
    model: str
    batch: int
    tier: str
    peak_over_idle_bytes: int
    predicted_bytes: int
    predicted_error: float | None
    over_strong: float
    idle_bytes: int
    peak_bytes: int
    step_ms: float
    fastest_step_ms: float
    time_ratio: float
    forward_ms: float
    down_bytes: int
    up_bytes: int


def memory(
    model: Annotated[str, typer.Option(help="a model with preset tiers")] = "resnet20",
    batch: Annotated[int, typer.Option(min=1, help="samples per local step")] = 32,
    steps: Annotated[int, typer.Option(min=1, help="local steps")] = 10,
    repeat: Annotated[int, typer.Option(min=1, help="repetitions, each with fresh processes")] = 3,
    engine: Engines = None,
    outputs: Annotated[
        list[OutputsMode] | None,
        typer.Option(help="of ExecuTorch programs, may be repeated: caller and planned; default: caller"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Anonymous memory of an agent at the peak of a round, over the same agent idle, per engine and tier."""
    check_choice([model])

    rows = []
    with reporting(console=errors) as say:
        for name in [each.value for each in engine] if engine else engines():
            for form in _outputs_of(name, outputs):
                say(f"{name}: training one round per tier and repetition")
                rows += measure(
                    model=model, batch=batch, steps=steps, repeat=repeat, engine=name, outputs=form
                )
    report("memory", "peak memory in training, over the idle agent", rows, _memory_columns, as_json)


def _outputs_of(engine: str, chosen: list[OutputsMode] | None) -> Sequence[str]:
    """Return the values of ``--outputs`` for an engine; onnxruntime has no choice."""
    return [each.value for each in chosen] if chosen and engine == "executorch" else ["caller"]


def _memory_columns(row: MemoryRow) -> dict[str, Any]:
    error = row.predicted_error
    return {
        "engine": row.engine if row.outputs == "caller" else f"{row.engine}, {row.outputs}",
        "tier": row.tier,
        "peak MB": f"{row.peak_over_idle_bytes / 1e6:.1f}",
        "predicted": "-" if error is None else f"{error:+.0%}",
        "of strong": f"{row.over_strong:.2f}",
        "step ms": row.fastest_step_ms,
        "time ratio": f"{row.time_ratio:.2f}",
        "MB down": f"{row.down_bytes / 1e6:.1f}",
        "MB up": f"{row.up_bytes / 1e6:.1f}",
    }


@dataclass(frozen=True)
class _RoundFigures:
    """Figures of one round by tier: the agent's report, its fastest step, its bundle's plan and its time ratio."""

    reports: dict[str, dict[str, Any]]
    fastest: dict[str, float]
    planned: dict[str, int]
    ratios: dict[str, float]


def engines() -> list[str]:
    """Return the engines that are installed."""
    names = ["onnx"]
    with contextlib.suppress(metadata.PackageNotFoundError):
        metadata.version("executorch")
        names.append("executorch")
    return names


def measure(
    *,
    model: str = "resnet20",
    batch: int = 32,
    steps: int = 10,
    repeat: int = 3,
    engine: str = "onnx",
    outputs: str = "caller",
) -> list[MemoryRow]:
    """Run one round per repetition, with one fresh agent per tier.

    Args:
        model: model with preset tiers.
        batch: samples per step.
        steps: local steps.
        repeat: repetitions.
        engine: engine of the agents.
        outputs: memory of ExecuTorch's outputs, ``caller`` or ``planned``.
    """
    federation = _federation(model, batch, steps, engine, outputs)
    runs = [_one_round(federation, timed=number == 0) for number in range(repeat)]
    tiers = list(runs[0].reports)
    over = {
        tier: int(
            statistics.median(
                run.reports[tier]["peak_bytes"] - run.reports[tier]["idle_bytes"] for run in runs
            )
        )
        for tier in tiers
    }
    strongest = max(over.values())
    what = (engine, outputs, model, batch)
    return [_row((*what, tier), runs, over[tier], over[tier] / strongest) for tier in tiers]


def _row(
    what: tuple[str, str, str, int, str], runs: Sequence[_RoundFigures], over: int, share: float
) -> MemoryRow:
    engine, outputs, model, batch, tier = what
    seen, planned = [run.reports[tier] for run in runs], runs[0].planned.get(tier, 0)

    def median(key: str) -> float:
        return float(statistics.median(item[key] for item in seen))

    return MemoryRow(
        engine=_NAMES[engine],
        outputs=outputs,
        model=model,
        batch=batch,
        tier=tier,
        peak_over_idle_bytes=over,
        predicted_bytes=planned,
        predicted_error=round(planned / over - 1, 4) if planned else None,
        over_strong=round(share, 4),
        idle_bytes=int(median("idle_bytes")),
        peak_bytes=int(median("peak_bytes")),
        step_ms=round(median("step_ms"), 2),
        fastest_step_ms=round(min(run.fastest[tier] for run in runs), 2),
        time_ratio=runs[0].ratios[tier],
        forward_ms=round(median("forward_ms"), 1),
        down_bytes=int(median("down_bytes")),
        up_bytes=int(median("up_bytes")),
    )


def _federation(model: str, batch: int, steps: int, engine: str, outputs: str) -> Federation:
    tables: dict[str, Any] = {
        "federation": {"name": "bench-memory", "rounds": 1},
        "model": {"name": model},
        "algorithm": {"steps": steps, "batch": batch},
        "data": {"name": "random", "partition": "iid"},
        "round": {"evaluate_every": 0},
        "broker": {"kind": "amqtt"},
        "export": {"outputs": outputs},
    }
    federation = completed(parse(tables, source="the benchmark"), per_tier=1)
    tiers = {name: table.model_copy(update={"engine": engine}) for name, table in federation.tiers.items()}
    devices = sum(table.count for table in tiers.values())
    data = federation.data.model_copy(update={"train_samples": SAMPLES_PER_DEVICE * devices})
    return federation.model_copy(update={"data": data, "tiers": tiers})


def _one_round(federation: Federation, *, timed: bool) -> _RoundFigures:
    dataset = open_data(federation)
    with tempfile.TemporaryDirectory(prefix="edgefl-bench-") as folder:
        events = list(events_of(lab_of(federation, Path(folder))))
        bundles, planned = {}, {}
        for path in sorted((Path(folder) / "bundles").rglob("*.efl")):
            manifest = read_bundle(path).manifest
            bundles[manifest.tier] = path
            planned[manifest.tier] = manifest.planned_bytes
        compared = bundles if timed else {}
        ratios = {
            tier: _time_ratio(path, plain_graph(path, federation, dataset, Path(folder) / f"{tier}.plain"))
            for tier, path in compared.items()
        }
    return _RoundFigures(_reports(events, list(federation.tiers)), _fastest(events), planned, ratios)


def _reports(events: Sequence[Mapping[str, Any]], order: list[str]) -> dict[str, dict[str, Any]]:
    """Return the last report of each tier's agent."""
    reports = [event for event in events if event.get("event") == "deviceseen" and event.get("idle_bytes")]
    return {
        event["tier"]: dict(event) for event in sorted(reports, key=lambda event: order.index(event["tier"]))
    }


def _fastest(events: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the fastest step that each tier's agent reported, among its progress and its median."""
    fastest: dict[str, float] = {}
    for event in events:
        measurement = event.get("stage") == "train" or event.get("idle_bytes")
        if event.get("event") == "deviceseen" and measurement and event.get("step_ms", 0.0) > 0.0:
            tier = event["tier"]
            fastest[tier] = min(event["step_ms"], fastest.get(tier, event["step_ms"]))
    return fastest


def plain_graph(path: Path, federation: Federation, dataset: Dataset, target: Path) -> Path:
    """Write the training graph of the bundle at ``path``, without measures for memory, to ``target``.

    For onnxruntime the measures are settings outside the graph; a program of ExecuTorch is compiled again.
    """
    bundle = read_bundle(path)
    manifest = bundle.manifest
    name = manifest.phases[0].graph
    if manifest.graph(name).format != "executorch":
        target.write_bytes(bundle.graph_bytes(name))
        return target
    from edgefl_export.executorch.program.write import to_executorch
    from edgefl_export.executorch.target import ExecuTorchTarget

    tier = tier_of(federation, federation_model(federation, dataset), manifest.tier)
    function = tier.algorithm.phases[0].function
    planned = manifest.graph(name).planned_outputs
    target.write_bytes(
        to_executorch(ExecuTorchTarget().capture(function), lean=False, planned_outputs=planned).model
    )
    return target


def _time_ratio(path: Path, without: Path) -> float:
    """Return the ratio of fastest steps of the training graph with and without the measures for memory."""
    module = "benchmarks.workers.bundle"
    ours, plain = worker_of(module, path, 1, threads=1), worker_of(module, path, 1, without, threads=1)
    with running((ours, plain), "the ratio of steps"):
        for worker in (ours, plain):
            worker.run(1, count=False)
        run_blocks((ours, plain), TURNS, TURN_STEPS)
    return round(min(ours.times) / min(plain.times), 3)
