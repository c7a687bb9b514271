"""What the simulators are measured on: federations, and the same for the engines of others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.simulate.work import Job, Work, result
from edgefl.config import Federation, load, parse
from edgefl.config.text import dump
from edgefl.data import datasets
from edgefl.data.dataset import Array, Dataset
from edgefl.setup.data import open_data, partition
from edgefl.setup.tiers import completed, device_names
from edgefl.simulator.folder import MODEL_NAME
from edgefl.simulator.functions import SimulationPlan
from edgefl.system.distribution import version
from edgefl.system.files import write_text
from edgefl.wire import tensors

_CLASSES = 10
_LARGEST = 400


@dataclass(frozen=True)
class Task:
    """``model``: of :data:`benchmarks.simulate.models.MODELS`. ``data``: the table of the federation file. ``skewed``:
    clients have two classes each and sizes of a power law (:func:`skewed`), in place of what ``data`` says."""

    name: str
    model: str
    data: dict[str, Any]
    clients: int
    per_round: int
    rounds: int
    steps: int
    batch: int
    lr: float
    skewed: bool = False

    def write(self, folder: Path, simulation: dict[str, Any]) -> tuple[int, ...]:
        """``folder`` for every engine: the federation file, and arrays. The shape of a sample. DataError where the dataset
        is not found."""
        data = dict(self.data)
        if self.skewed:
            path = skewed(datasets.load(data["name"]), self.clients).save(folder / "data.npz")
            data |= {"name": "file", "file": str(path), "partition": "owners"}
        federation = completed(self._federation(data, simulation))
        dataset = open_data(federation)
        parts = partition(federation, dataset, len(device_names(federation)))
        write_text(folder / FEDERATION, dump(federation))
        own = {each.name: getattr(self, each.name) for each in fields(Job) if hasattr(self, each.name)}
        job = Job(**own, scale=dataset.scale, shift=dataset.shift)
        Work.write(folder, job, (dataset.train_x, dataset.train_y), (dataset.test_x, dataset.test_y), parts)
        return tuple(dataset.train_x.shape[1:])

    def _federation(self, data: dict[str, Any], simulation: dict[str, Any]) -> Federation:
        tables = {
            "federation": {"name": self.name, "rounds": self.rounds},
            "model": {"name": f"benchmarks.simulate.models:{self.model}"},
            "algorithm": {
                "batch": self.batch,
                "steps": self.steps,
                "lr": self.lr,
                "momentum": 0.0,
                "weight_decay": 0.0,
            },
            "data": {"test_samples": 0, **data},
            "round": {
                "fraction": self.per_round / self.clients,
                "weighting": "samples",
                "evaluate_every": 0,
            },
            "tiers": {"all": {"count": self.clients}},
            "simulation": simulation,
        }
        return parse(tables, source=f"task {self.name}")


def skewed(dataset: Dataset, clients: int, seed: int = 0) -> Dataset:
    """The dataset dealt as LEAF deals MNIST: two classes to a client, half of its rows of each, and sizes of a power law:
    10 and a log-normal number (median 20, deviation 1 of the logarithm), at most 400. Rows of nobody are left out."""
    draw = np.random.default_rng(seed)
    sizes = np.minimum(10 + draw.lognormal(np.log(20.0), 1.0, clients), _LARGEST).astype(int)
    left = [draw.permutation(np.flatnonzero(dataset.train_y == label)).tolist() for label in range(_CLASSES)]
    rows: list[int] = []
    owners: list[int] = []
    for client, size in enumerate(sizes):
        for label, count in (
            (client % _CLASSES, (size + 1) // 2),
            ((client + 1) % _CLASSES, size // 2),
        ):
            taken = [left[label].pop() for _ in range(min(count, len(left[label])))]
            rows += taken
            owners += [client] * len(taken)
    return _of(dataset, rows, owners)


def _of(dataset: Dataset, rows: Sequence[int], owners: Sequence[int]) -> Dataset:
    chosen: Array = np.array(rows)
    return replace(
        dataset,
        train_x=dataset.train_x[chosen],
        train_y=dataset.train_y[chosen],
        owners=np.array(owners, np.int64),
    )


_MNIST = {"name": "mnist", "partition": "iid"}


def _linear(clients: int) -> Task:
    return Task("linear", "logistic", _MNIST, clients, clients // 100, 20, 6, 10, 0.03)


TASKS: dict[str, tuple[Task, ...]] = {
    "pfl-cifar10": (
        Task(
            "pfl-cifar10",
            "pfl_cnn",
            {"name": "cifar10_jpeg", "partition": "iid"},
            clients=1000,
            per_round=50,
            rounds=20,
            steps=5,
            batch=10,
            lr=0.1,
        ),
    ),
    "flute-mnist": (Task("flute-mnist", "logistic", _MNIST, 1000, 10, 100, 6, 10, 0.03, skewed=True),),
    "linear": tuple(_linear(clients) for clients in (1000, 3000, 10_000)),
}
"""By name; ``linear`` is for edgefl alone, with more and more clients of which 1 % make each round."""


FEDERATION = "federation.toml"
_OUT = "out"


def edgefl_arguments(folder: Path) -> list[str]:
    """Return the arguments of Python."""
    return ["-m", "edgefl", "simulate", str(folder / FEDERATION), "--out", str(folder / _OUT), "--json"]


def edgefl_result(folder: Path, moments: Sequence[float]) -> dict[str, Any]:
    """Return the result of the run in ``folder``; ``moments`` are those at which the command reported a round."""
    federation = load(folder / FEDERATION)
    each = federation.round.model_copy(update={"evaluate_every": 1})
    spec = SimulationPlan.of(federation.model_copy(update={"round": each}), open_data(federation)).spec
    assert spec.evaluate is not None
    accuracy = spec.evaluate(tensors.load((folder / _OUT / MODEL_NAME).read_bytes()))["accuracy"]
    return result(moments, accuracy, version())
