"""The rows of Per-FedAvg's Table 1 as federations (per_fedavg.md 3 and 4.1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from reproduce.entry import Chart, Federated, Settings
from reproduce.per_fedavg.personal import STEPS, measured

FEDAVG, FO, HF = "FedAvg", "FO", "HF"
METHODS = (FEDAVG, FO, HF)
TWICE, FOUR_TIMES = "FedAvg 2tau", "FedAvg 4tau"
"""FedAvg with as many gradients as FO and as HF."""
BATCH = 40


@dataclass(frozen=True, eq=False)
class Row:
    """A row: its ``data``, local steps, inner step size, whether half B has a single class, and the paper's numbers by
    method."""

    data: str
    tau: int
    alpha: float
    single: bool = False
    paper: Mapping[str, float] | None = None

    @property
    def name(self) -> str:
        hetero = ", single class" if self.single else ""
        return f"{self.data}, tau={self.tau}, alpha={self.alpha:g}{hetero}"

    def arm(self, method: str) -> str:
        return f"{self.name}: {method}"


@dataclass(frozen=True)
class Size:
    """Size of a run: ``users`` of which the share ``fraction`` trains in each of ``rounds`` rounds, with local
    learning rate ``lr`` on ``a`` samples of a class, tested on ``a_test`` (per_fedavg.md 3.2); ``pixels`` are the scaling
    of the data, ``together`` the users of one call."""

    rounds: int
    lr: float
    a: int
    a_test: int
    users: int = 50
    fraction: float = 0.2
    pixels: str = "unit"
    together: int = 10


def federation(row: Row, method: str, size: Size) -> Settings:
    """``row`` trained by ``method``. All methods begin with the same weights, users and selections."""
    return {
        "model.name": "elu_mlp",
        "data.name": DATASETS[row.data],
        "data.scale": size.pixels,
        "data.partition": "groups",
        "data.group_samples": size.a,
        "data.group_test_samples": size.a_test,
        "data.single_class": row.single,
        "data.test_samples": 0,  # all: each user has test samples of its own
        "algorithm.batch": BATCH,
        "algorithm.lr": size.lr,
        "algorithm.steps": row.tau,
        "algorithm.alpha": row.alpha,
        **ALGORITHMS[method],
        "round.fraction": size.fraction,
        "round.evaluate_every": max(1, size.rounds // 10),
        "federation.rounds": size.rounds,
        "tiers": {"user": {"count": size.users}},
        "simulation.together": min(size.together, round(size.users * size.fraction)),
    }


DATASETS: Mapping[str, str] = {"MNIST": "mnist", "CIFAR-10": "cifar10_jpeg"}
ALGORITHMS: Mapping[str, Settings] = {
    FEDAVG: {"algorithm.name": "fedavg_update"},
    TWICE: {"algorithm.name": "fedavg_matched", "algorithm.factor": 2},
    FOUR_TIMES: {"algorithm.name": "fedavg_matched", "algorithm.factor": 4},
    FO: {"algorithm.name": "per_fedavg", "algorithm.mode": "fo"},
    HF: {"algorithm.name": "per_fedavg", "algorithm.mode": "hf"},
}


def steps_chart(file: str, title: str, row: Row, methods: Sequence[str]) -> Chart:
    """Return the chart of the users' accuracy by steps of adaptation, for the ``methods`` of a row."""
    names = tuple(row.arm(each) for each in methods)
    return Chart(file, f"{title}: users by steps of adaptation", STEPS, x="steps", y="accuracy", arms=names)


def arms(row: Row, methods: Sequence[str], size: Size) -> list[Federated]:
    return [Federated(row.arm(method), federation(row, method, size), measured) for method in methods]
