"""``python -m benchmarks personal-layers``: accuracy on the devices' own held-out rows.

Each run is simulated and ends with an evaluation round. The models of FedAvg and Per-FedAvg are measured again after a few
steps on each device's training rows. Learning rates come from a grid on a seed of their own.
"""

from __future__ import annotations

import math
import re
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import msgspec
import numpy as np
import torch
import typer
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.options import Json
from benchmarks.results import measured, report
from edgefl.analysis.charts import HEIGHT, WIDTH, bar_chart
from edgefl.analysis.personal.evaluate import User, evaluate_user
from edgefl.analysis.personal.finished import FinishedRun
from edgefl.analysis.personal.report import EvaluationSetting
from edgefl.api.simulate import prepare_simulation
from edgefl.config import Federation, parse
from edgefl.contract.tensors import TensorSpec
from edgefl.data.dataset import Dataset
from edgefl.errors import DivergedError, EdgeflError
from edgefl.models.layers.initial import initialize
from edgefl.models.layers.norms import BatchNorm
from edgefl.models.losses import CausalLM
from edgefl.models.spec import ModelSpec, sequential
from edgefl.setup.data import open_data, partition
from edgefl.setup.model import data_spec
from edgefl.setup.tiers import completed, device_names
from edgefl.system.files import write_text
from edgefl_device.data.samples import FittedData, is_held_out
from edgefl_device.data.support import SampleShards

SPLIT = 0.2
"""Share of a device's rows that are held out."""
TUNING_SEED = 100
"""Seed that learning rates are chosen on. Results have other seeds."""
ADAPTATION = (1, 10)
"""Numbers of adaptation steps."""
_T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Student's t at 97.5 %, by degrees of freedom from 1."""
MODE = "fo"
"""Form of Per-FedAvg: first-order, two gradients a step."""
_TIER = "device"


class PersonalDataset(StrEnum):
    """Dataset, and how it is spread over devices."""

    shakespeare = "shakespeare"
    fashion_01 = "fashion-0.1"
    fashion_05 = "fashion-0.5"
    digits = "digits"


class AlgorithmName(StrEnum):
    """Algorithm of the devices."""

    fedavg = "fedavg"
    fedper = "fedper"
    fedrep = "fedrep"
    fedbn = "fedbn"
    per_fedavg = "per_fedavg"


ADAPTABLE = (AlgorithmName.fedavg, AlgorithmName.per_fedavg)
"""Algorithms whose model is also measured after adaptation to each device."""


@dataclass(frozen=True)
class PersonalTask:
    """Dataset spread over devices, and the model that learns it.

    Attributes:
        title: Name in tables.
        model: Table ``[model]``.
        data: Table ``[data]``.
        rates: Learning rates to choose from.
        alphas: Step sizes of the adaptation to choose from.
        by_speaker: True: each device has the rows of one speaker.
    """

    title: str
    model: dict[str, Any]
    data: dict[str, Any]
    rates: tuple[float, ...]
    alphas: tuple[float, ...]
    by_speaker: bool = False


@dataclass(frozen=True)
class RunScale:
    """Size of a run: devices, mean rows of a device, rounds, local steps and their batch."""

    devices: int = 20
    rows: int = 300
    rounds: int = 30
    steps: int = 6
    batch: int = 16


QUICK = RunScale(devices=4, rows=60, rounds=2, steps=4, batch=8)


def _fashion(alpha: float, rates: tuple[float, ...]) -> PersonalTask:
    return PersonalTask(
        f"Fashion-MNIST, Dirichlet {alpha:g}",
        {"name": "fedbat_cnn", "options": {"widths": [8, 16]}},
        {"name": "fashion_mnist", "partition": "dirichlet", "alpha": alpha},
        rates=rates,
        alphas=(0.03, 0.1, 0.3),
    )


class CausalConv(nn.Module):
    """Convolution over the present character and those before it, batch norm, ReLU: (B, C, 1, T) -> (B, W, 1, T)."""

    def __init__(self, inside: int, width: int, reach: int) -> None:
        super().__init__()
        self.reach = reach
        self.conv = nn.Conv2d(inside, width, (1, reach), bias=False)
        self.norm = BatchNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.conv(F.pad(x, (self.reach - 1, 0)))))


class Characters(nn.Embedding):
    """Character numbers (B, T) int64 -> vectors (B, E, 1, T)."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).transpose(1, 2).contiguous().unsqueeze(2)


class NextCharacter(nn.Linear):
    """Features (B, W, 1, T) -> logits of the next character (B, T, V)."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.squeeze(2).transpose(1, 2).contiguous())


def text_cnn(
    *, length: int, vocabulary: int, features: int = 16, width: int = 64, seed: int = 0
) -> ModelSpec:
    """Return a model of the next character from the last seven: embedding, two causal convolutions, decoder."""

    def units() -> nn.Sequential:
        return sequential(
            [
                ("embed", Characters(vocabulary, features)),
                ("conv1", CausalConv(features, width, 4)),
                ("conv2", CausalConv(width, width, 4)),
                ("head", NextCharacter(width, vocabulary)),
            ]
        )

    sample, loss = TensorSpec((length,), torch.int64, vocabulary), CausalLM(ignore_index=None, shift=False)
    return ModelSpec("text_cnn", initialize(units, seed), sample, vocabulary, loss=loss)


TASKS = {
    PersonalDataset.shakespeare: PersonalTask(
        "Tiny Shakespeare, by speaker",
        {"name": "benchmarks.personal_layers:text_cnn"},
        {"name": "shakespeare", "length": 32, "partition": "owners"},
        rates=(1.0, 3.0, 10.0),
        alphas=(0.1, 0.3, 1.0),
        by_speaker=True,
    ),
    PersonalDataset.fashion_01: _fashion(0.1, (0.03, 0.1, 0.3, 1.0)),
    PersonalDataset.fashion_05: _fashion(0.5, (0.03, 0.1, 0.3)),
    PersonalDataset.digits: PersonalTask(
        "scikit-learn digits, Dirichlet 0.5",
        {"name": "fedbat_cnn", "options": {"widths": [4, 8]}},
        {"name": "digits", "partition": "dirichlet", "alpha": 0.5},
        rates=(0.1,),
        alphas=(0.03,),
    ),
}


@dataclass(frozen=True)
class PersonalCase:
    """One run. ``alphas``: step sizes to adapt with afterwards, by number of steps; the first one is Per-FedAvg's own."""

    dataset: PersonalDataset
    algorithm: AlgorithmName
    seed: int
    scale: RunScale
    lr: float
    alphas: dict[int, tuple[float, ...]] = field(default_factory=dict)

    @property
    def alpha(self) -> float | None:
        """Inner step size of Per-FedAvg's training; None for others."""
        return self.alphas[1][0] if self.algorithm == AlgorithmName.per_fedavg else None


class DevicesResult(msgspec.Struct, frozen=True, kw_only=True):
    """Accuracy of a model on the devices' held-out rows: over all rows, and the median and the worst decile of the devices.

    ``steps`` and ``alpha``: number and size of the steps on the device's training rows before that.
    """

    accuracy: float
    median: float
    worst_decile: float
    steps: int = 0
    alpha: float = 0.0


class PersonalRow(msgspec.Struct, frozen=True, kw_only=True):
    """One run: a line of the file of results.

    Attributes:
        lr: Learning rate.
        alpha: Inner step size of Per-FedAvg; None for others.
        held_out: Held-out rows of the ``measured`` devices that have some.
        result: Result of the evaluation round. Devices with private tensors measure their own models.
        adapted: Results after adaptation; empty unless the algorithm is in :data:`ADAPTABLE`.
    """

    dataset: PersonalDataset
    algorithm: AlgorithmName
    seed: int
    scale: RunScale
    lr: float
    alpha: float | None
    measured: int
    held_out: int
    result: DevicesResult
    adapted: tuple[DevicesResult, ...]
    seconds: float

    def after(self, steps: int, alpha: float | None = None) -> DevicesResult:
        """Return the result after ``steps`` adaptation steps of size ``alpha``; None: the best one."""
        if not steps:
            return self.result
        known = [each for each in self.adapted if each.steps == steps and alpha in (None, each.alpha)]
        return max(known, key=lambda each: each.accuracy)


class PersonalSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a method over the seeds, in percent. Each ``*_interval`` is half of the 95 % t-interval of the mean.

    Attributes:
        method: Algorithm, and the adaptation after it.
        gain: Accuracy less FedAvg's with the same seed; None for FedAvg itself, and without it.
        lr: Chosen learning rate.
        alpha: Chosen step size of the adaptation; None without.
    """

    dataset: str
    method: str
    seeds: int
    accuracy: float
    accuracy_interval: float
    gain: float | None
    gain_interval: float | None
    worst_decile: float
    worst_decile_interval: float
    lr: float
    alpha: float | None


def personal_layers(
    dataset: Annotated[
        list[PersonalDataset] | None,
        typer.Option("--data", help="may be repeated; default: all but digits, with --quick digits alone"),
    ] = None,
    algorithm: Annotated[
        list[AlgorithmName] | None, typer.Option(help="may be repeated; default: all")
    ] = None,
    seeds: Annotated[int, typer.Option(min=2, max=10, help="runs of each, with the seeds from 1")] = 5,
    rounds: Annotated[int, typer.Option(min=0, help="number of rounds; 0: as planned")] = 0,
    out: Annotated[
        Path | None,
        typer.Option(help="file of the runs, a line of JSON each; runs that it has are not repeated"),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="few devices, rows and rounds: numbers mean nothing")
    ] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="print the table as Markdown")] = False,
    as_json: Json = False,
) -> None:
    """Accuracy on the devices' own held-out rows of FedAvg, FedPer, FedRep, FedBN and Per-FedAvg, simulated.

    shakespeare: each of 20 devices has one speaker of Tiny Shakespeare, and a small causal CNN predicts the next character.
    fashion-0.1, fashion-0.5: Fashion-MNIST over 20 devices by Dirichlet 0.1 and 0.5, and a small CNN. Both models have
    batch norm. A fifth of each device's rows is held out. An evaluation round after the last training round measures the
    devices' models on them.

    The models of FedAvg and Per-FedAvg are also measured after 1 and 10 SGD steps on the device's training rows. A grid on
    seed 100 chooses learning rates and step sizes first, by the accuracy on held-out rows.

    With --out, a picture of the results is written beside the file, as .svg.

    Examples:

      python -m benchmarks personal-layers --out personal_layers.jsonl

      python -m benchmarks personal-layers --quick --seeds 2
    """
    tasks = dataset or (
        [PersonalDataset.digits] if quick else [each for each in PersonalDataset if each != "digits"]
    )
    scale = QUICK if quick else RunScale()
    scale = replace(scale, rounds=rounds or scale.rounds)
    campaign = PersonalCampaign(tasks, algorithm or list(AlgorithmName), scale, out)
    failed = [each for each in campaign.run(campaign.grid_cases()) if not isinstance(each, DivergedError)]
    if not failed:
        failed = campaign.run(campaign.cases(seeds))
    summaries = [] if failed else campaign.summarize(seeds)
    if out and summaries:
        write_text(out.with_suffix(".svg"), picture(summaries))
    if markdown and not failed:
        typer.echo(markdown_table(summaries))
    else:
        title = f"{SPLIT:.0%} of each device's rows held out, {seeds} seeds"
        report("personal-layers", title, summaries, _columns, as_json, failed)


def _columns(row: PersonalSummary) -> dict[str, Any]:
    return {
        "data": row.dataset,
        "method": row.method,
        "accuracy, %": f"{row.accuracy:.1f} ± {row.accuracy_interval:.1f}",
        "over FedAvg": _gain(row),
        "worst decile, %": f"{row.worst_decile:.1f} ± {row.worst_decile_interval:.1f}",
    }


def _gain(row: PersonalSummary) -> str:
    return "-" if row.gain is None else f"{row.gain:+.1f} ± {row.gain_interval:.1f}"


class PersonalCampaign:
    """Runs of the benchmark, with the finished ones in a file.

    Args:
        datasets: Datasets to learn.
        algorithms: Algorithms to measure.
        scale: Size of each run.
        out: File of finished runs; None: they are kept in memory.
    """

    def __init__(
        self,
        datasets: Sequence[PersonalDataset],
        algorithms: Sequence[AlgorithmName],
        scale: RunScale,
        out: Path | None,
    ) -> None:
        self._pairs = [(dataset, algorithm) for dataset in datasets for algorithm in algorithms]
        self._scale, self._out = scale, out
        lines = out.read_bytes().splitlines() if out and out.is_file() else []
        known = [msgspec.json.decode(line, type=PersonalRow) for line in lines]
        self._rows = {key_of(row): row for row in known}

    def grid_cases(self) -> Iterator[PersonalCase]:
        """Yield the runs that choose between several settings of an algorithm."""
        for dataset, algorithm in self._pairs:
            tried = grid(dataset, algorithm, self._scale)
            yield from tried if len(tried) > 1 else ()

    def cases(self, seeds: int) -> Iterator[PersonalCase]:
        """Yield the runs of the results, with the settings that the grid chose, for the seeds from 1."""
        for seed in range(1, seeds + 1):
            for dataset, algorithm in self._pairs:
                yield replace(self._choose(dataset, algorithm), seed=seed)

    def run(self, cases: Iterator[PersonalCase]) -> list[EdgeflError]:
        """Measure the cases that the file lacks, add them to it, and return the errors of those that fail."""
        missing = (case for case in cases if key_of(case) not in self._rows)
        _, failed = measured(missing, self._measure, _run_columns)
        return failed

    def _measure(self, case: PersonalCase, say: Callable[[str], None]) -> PersonalRow:
        row = measure(case, say)
        self._rows[key_of(row)] = row
        if self._out:
            self._out.parent.mkdir(parents=True, exist_ok=True)
            with self._out.open("ab") as file:
                file.write(msgspec.json.encode(row) + b"\n")
        return row

    def _choose(self, dataset: PersonalDataset, algorithm: AlgorithmName) -> PersonalCase:
        """Return the settings of the grid with the best accuracy: Per-FedAvg's after one adaptation step."""
        tried = grid(dataset, algorithm, self._scale)
        if len(tried) == 1:
            return tried[0]
        tried = [case for case in tried if key_of(case) in self._rows]  # without those that diverged
        steps = int(algorithm == AlgorithmName.per_fedavg)
        best = max(tried, key=lambda case: self._rows[key_of(case)].after(steps).accuracy)
        row = self._rows[key_of(best)]
        return replace(best, alphas={steps: (row.after(steps).alpha,) for steps in best.alphas})

    def summarize(self, seeds: int) -> list[PersonalSummary]:
        """Return the results of all methods over the seeds from 1."""
        baseline: dict[PersonalDataset, list[float]] = {}
        found = []
        for dataset, algorithm in self._pairs:
            chosen = self._choose(dataset, algorithm)
            rows = [self._rows[key_of(replace(chosen, seed=seed))] for seed in range(1, seeds + 1)]
            for steps in (0, *ADAPTATION) if algorithm in ADAPTABLE else (0,):
                alpha = chosen.alphas[steps][0] if steps else None
                results = [row.after(steps, alpha) for row in rows]
                accuracy = [100 * each.accuracy for each in results]
                gains = [own - base for own, base in zip(accuracy, baseline.get(dataset, ()), strict=False)]
                if algorithm == AlgorithmName.fedavg and not steps:
                    baseline[dataset] = accuracy
                worst = [100 * each.worst_decile for each in results]
                found.append(
                    PersonalSummary(
                        dataset=TASKS[dataset].title,
                        method=_method(algorithm, steps),
                        seeds=len(rows),
                        accuracy=statistics.mean(accuracy),
                        accuracy_interval=interval(accuracy),
                        gain=statistics.mean(gains) if gains else None,
                        gain_interval=interval(gains) if gains else None,
                        worst_decile=statistics.mean(worst),
                        worst_decile_interval=interval(worst),
                        lr=chosen.lr,
                        alpha=alpha,
                    )
                )
        return found


_NAMES = {
    AlgorithmName.fedavg: "FedAvg",
    AlgorithmName.fedper: "FedPer",
    AlgorithmName.fedrep: "FedRep",
    AlgorithmName.fedbn: "FedBN",
    AlgorithmName.per_fedavg: "Per-FedAvg",
}


def _method(algorithm: AlgorithmName, steps: int) -> str:
    return _NAMES[algorithm] + (f", {steps} step{'s' if steps > 1 else ''}" if steps else "")


def grid(dataset: PersonalDataset, algorithm: AlgorithmName, scale: RunScale) -> list[PersonalCase]:
    """Return the settings of an algorithm to choose from: learning rates, and for Per-FedAvg step sizes."""
    task = TASKS[dataset]
    cases = [PersonalCase(dataset, algorithm, TUNING_SEED, scale, lr) for lr in task.rates]
    if algorithm == AlgorithmName.per_fedavg:  # one step is as long as in training
        return [
            replace(case, alphas={1: (alpha,), 10: task.alphas}) for case in cases for alpha in task.alphas
        ]
    alphas = dict.fromkeys(ADAPTATION, task.alphas) if algorithm in ADAPTABLE else {}
    return [replace(case, alphas=alphas) for case in cases]


def key_of(run: PersonalCase | PersonalRow) -> tuple[Any, ...]:
    """Return the settings that identify a run."""
    return run.dataset, run.algorithm, run.seed, run.scale, run.lr, run.alpha


def interval(values: Sequence[float]) -> float:
    """Return half of the 95 % t-interval of the mean of 2 to 10 values."""
    return _T_95[len(values) - 2] * statistics.stdev(values) / math.sqrt(len(values))


def _run_columns(row: PersonalRow) -> dict[str, Any]:
    after = {
        f"after {each.steps} of {each.alpha:g}": f"{each.accuracy:.1%}" for each in row.adapted if each.steps
    }
    return {
        "data": row.dataset.value,
        "algorithm": row.algorithm.value,
        "seed": row.seed,
        "lr": row.lr,
        **({} if row.alpha is None else {"alpha": row.alpha}),
        "accuracy": f"{row.result.accuracy:.1%}",
        "worst decile": f"{row.result.worst_decile:.1%}",
        **after,
        "s": row.seconds,
    }


def measure(case: PersonalCase, say: Callable[[str], None] = lambda _: None) -> PersonalRow:
    """Simulate one run, and measure its models on the devices' held-out rows. Raises EdgeflError if the run fails."""
    began = time.monotonic()
    name = f"{case.dataset}, {case.algorithm}, seed {case.seed}, lr {case.lr:g}"
    with TemporaryDirectory(prefix="edgefl-personal-") as folder:
        say(f"{name}: reading the data")
        federation = federation_of(case, Path(folder))
        prepared = prepare_simulation(federation, Path(folder) / "run", fresh=True)
        simulation = prepared.run(lambda row: say(f"{name}: round {row.round} of {case.scale.rounds}"))
        evaluated = next(row.evaluation for row in reversed(simulation.history) if row.evaluation)
        group = evaluated.devices
        assert group is not None
        adapted = []
        if case.alphas:
            run = FinishedRun(prepared.folder, prepared.federation, prepared.dataset, simulation.model)
            users = users_of(run)
            for alpha in sorted({alpha for alphas in case.alphas.values() for alpha in alphas}):
                say(f"{name}: adapting by steps of {alpha:g}")
                steps = tuple(steps for steps, alphas in case.alphas.items() if alpha in alphas)
                adapted += adapt(run, users, alpha, steps, case)
    return PersonalRow(
        dataset=case.dataset,
        algorithm=case.algorithm,
        seed=case.seed,
        scale=case.scale,
        lr=case.lr,
        alpha=case.alpha,
        measured=group.devices,
        held_out=round(group.rows),
        result=DevicesResult(
            accuracy=group.metrics["accuracy"],
            median=group.median["accuracy"],
            worst_decile=group.worst_decile["accuracy"],
        ),
        adapted=tuple(adapted),
        seconds=round(time.monotonic() - began, 1),
    )


def federation_of(case: PersonalCase, folder: Path) -> Federation:
    """Return the federation of a run. ``folder``: place for the rows of a task by speaker."""
    task, scale = TASKS[case.dataset], case.scale
    algorithm: dict[str, Any] = {"name": case.algorithm.value, "lr": case.lr}
    algorithm |= {"batch": scale.batch, "steps": scale.steps}
    if case.algorithm == AlgorithmName.fedrep:  # as many gradients as the others
        algorithm |= {"head_steps": scale.steps // 2, "steps": scale.steps - scale.steps // 2}
    if case.algorithm == AlgorithmName.per_fedavg:
        algorithm |= {"alpha": case.alpha, "mode": MODE}
    tables: dict[str, Any] = {
        "federation": {"name": "personal-layers", "rounds": scale.rounds, "seed": case.seed},
        "model": task.model,
        "algorithm": algorithm,
        "data": {**task.data, "test_samples": 100},
        "round": {"evaluate_every": 0},
        "evaluate": {"split": SPLIT, "every": scale.rounds},
        "tiers": {_TIER: {"count": scale.devices}},
    }
    if task.by_speaker:
        tables["data"] = _write_speakers(parse(tables, source="the benchmark"), scale, folder)
    else:
        tables["data"] |= {"train_samples": scale.devices * scale.rows}
    return completed(parse(tables, source="the benchmark"))


def _write_speakers(federation: Federation, scale: RunScale, folder: Path) -> dict[str, Any]:
    """Write the first rows of the speakers with most rows, and return the table ``[data]`` that reads them.

    Bytes become numbers of the characters that occur.
    """
    dataset = open_data(federation)
    assert dataset.owners is not None
    characters = np.unique(np.concatenate([dataset.train_x, dataset.train_y, dataset.test_x, dataset.test_y]))
    speakers = np.argsort(-np.bincount(dataset.owners), kind="stable")[: scale.devices]
    rows = np.concatenate([np.flatnonzero(dataset.owners == each)[: scale.rows] for each in speakers])
    chosen = Dataset.of(
        *(np.searchsorted(characters, each) for each in (dataset.train_x[rows], dataset.train_y[rows])),
        *(np.searchsorted(characters, each) for each in (dataset.test_x, dataset.test_y)),
        name=dataset.name,
        classes=len(characters),
        below=len(characters),
        owners=dataset.owners[rows],
        test_owners=dataset.test_owners,
    )
    return {"name": "file", "file": str(chosen.save(folder / "speakers.npz")), "partition": "owners"}


def users_of(run: FinishedRun) -> list[User]:
    """Return the devices that hold out rows, each with its training rows and its held-out rows."""
    federation, dataset = run.federation, run.dataset
    names, users = device_names(federation), []
    for number, rows in enumerate(partition(federation, dataset, len(names), warn=lambda _: None)):
        data = FittedData(dataset.train_x[rows], dataset.train_y[rows], data_spec(dataset))
        held_out = is_held_out(data, federation.evaluate.split, federation.federation.seed)
        if not held_out.any():
            continue  # the device declines the evaluation round, too
        batch = dataset.train_batch(rows)
        y = batch["y"].reshape(len(rows), *run.spec.label.shape)
        shards = SampleShards(np.flatnonzero(~held_out), np.flatnonzero(held_out))
        users.append(User(number, torch.from_numpy(batch["x"]), torch.from_numpy(y), shards, names[number]))
    return users


def adapt(
    run: FinishedRun, users: Sequence[User], alpha: float, steps: tuple[int, ...], case: PersonalCase
) -> list[DevicesResult]:
    """Return the results on the users' held-out rows before and after ``steps`` of size ``alpha`` on their training rows."""
    setting = EvaluationSetting(alpha, steps, case.scale.batch, seed=case.seed, headline=steps[0])
    reports = [evaluate_user(run.adapters[_TIER], user, setting) for user in users]
    found = []
    for count in setting.curve:
        values = [each.after(count).metrics["accuracy"] for each in reports]
        found.append(
            DevicesResult(
                accuracy=float(np.average(values, weights=[each.query for each in reports])),
                median=float(np.median(values)),
                worst_decile=float(np.quantile(values, 0.1)),
                steps=count,
                alpha=alpha,
            )
        )
    return found


def markdown_table(rows: Sequence[PersonalSummary]) -> str:
    """Return the results as a table in Markdown."""
    header = "| data | method | lr | alpha | accuracy, % | over FedAvg, points | worst decile, % |"
    lines = [header, "|---" * 7 + "|"]
    for row in rows:
        cells = _columns(row)
        alpha = "-" if row.alpha is None else f"{row.alpha:g}"
        numbers = [cells["accuracy, %"], cells["over FedAvg"], cells["worst decile, %"]]
        lines.append("| " + " | ".join([row.dataset, row.method, f"{row.lr:g}", alpha, *numbers]) + " |")
    return "\n".join(lines)


def picture(rows: Sequence[PersonalSummary]) -> str:
    """Return the accuracies as SVG text, a chart of bars for each dataset below the last one."""
    charts = []
    for place, dataset in enumerate(dict.fromkeys(row.dataset for row in rows)):
        values = {  # names as short as fit below a bar
            re.sub(r", (\d+) steps?", r"+\1", row.method).replace("Per-FedAvg", "Per-FA"): row.accuracy
            for row in rows
            if row.dataset == dataset
        }
        legend = "Per-FA: Per-FedAvg; +1, +10: after so many steps on each device's training rows"
        chart = bar_chart(values, title=dataset, y="accuracy on held-out rows, %", x=legend)
        charts.append(chart.replace("<svg ", f'<svg y="{place * HEIGHT}" ', 1))
    size = f'viewBox="0 0 {WIDTH} {HEIGHT * len(charts)}" width="{WIDTH}" height="{HEIGHT * len(charts)}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{"".join(charts)}</svg>\n'
