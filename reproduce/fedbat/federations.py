"""FedBAT's federations: Fashion-MNIST spread in three ways, and what each method sends (fedbat.md 3, 4)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from edgefl.api.simulate import Simulation
from reproduce.entry import Measurements, Scale, Settings
from reproduce.results import Judged, Results, first_reached, judge_factory, told

Options = Mapping[str, Any]
IID, DIRICHLET, LABELS = "IID", "Non-IID-1", "Non-IID-2"
PARTITIONS: Mapping[str, Options] = {
    IID: {"data.partition": "iid"},
    DIRICHLET: {"data.partition": "dirichlet", "data.alpha": 0.3},
    LABELS: {"data.partition": "labels", "data.labels_per_device": 3},
}
"""Fashion-MNIST's (fedbat.md 4.2)."""

FEDAVG, SIGNSGD, EF, NOISY, STOC = "FedAvg", "SignSGD", "EF-SignSGD", "Noisy-SignSGD", "Stoc-SignSGD"
ZEROFL, FEDPAQ, BIFL, FEDBAT = "ZeroFL", "FedPAQ, 4 bits", "BiFL", "FedBAT"
CODECS: Mapping[str, str] = {
    FEDAVG: "dense",
    SIGNSGD: "signsgd",
    EF: "ef_signsgd",
    NOISY: "noisy_signsgd",
    STOC: "stoc_signsgd",
    ZEROFL: "zerofl",
    FEDPAQ: "fedpaq",
    BIFL: "bifl",
    FEDBAT: "fedbat",
}


@dataclass(frozen=True)
class Setup:
    """What all arms of an entry have alike. ``own``: settings of a method that differ from the paper's, by its name."""

    clients: int
    per_round: int
    rounds: int
    steps: int
    batch: int
    widths: tuple[int, ...]
    train_samples: int = 0
    test_samples: int = 0
    own: Mapping[str, Options] = field(default_factory=dict)

    def settings(self, method: str, partition: str, options: Options | None = None) -> Settings:
        """``options``: of the codec. The paper's plain SGD of step 0.1; an update weighs as many samples as it is from."""
        return {
            "federation.rounds": self.rounds,
            "model.name": "fedbat_cnn",
            "model.options": {"widths": list(self.widths)},
            "data.name": "fashion_mnist",
            "data.train_samples": self.train_samples,
            "data.test_samples": self.test_samples,
            **PARTITIONS[partition],
            "round.fraction": self.per_round / self.clients,
            "round.weighting": "samples",
            "round.weight_cap": 0,
            "algorithm.batch": self.batch,
            "algorithm.steps": self.steps,
            "algorithm.lr": 0.1,
            "algorithm.momentum": 0.0,
            "algorithm.weight_decay": 0.0,
            "codec.name": CODECS[method],
            **self.own.get(method, {}),
            **({"codec.options": dict(options)} if options else {}),
            "tiers": {"all": {"count": self.clients, "devices": ["all-*"]}},
        }


SETUPS: Mapping[Scale, Setup] = {
    "smoke": Setup(
        clients=4,
        per_round=2,
        rounds=2,
        steps=10,
        batch=4,
        widths=(4, 4, 4, 4),
        train_samples=200,
        test_samples=50,
    ),
    "cpu": Setup(
        clients=100,
        per_round=5,
        rounds=20,
        steps=80,
        batch=16,
        widths=(8, 16, 32, 64),
        test_samples=2_000,
        own={
            SIGNSGD: {"codec.options": {"alpha": 0.01}},
            STOC: {"codec.options": {"alpha": 0.1}},
            ZEROFL: {"codec.options": {"sparse_training": False}},
        },
    ),
    "paper": Setup(clients=100, per_round=10, rounds=100, steps=100, batch=64, widths=(32, 64, 128, 256)),
}
"""``cpu``: fedbat.md 9's reduction, a quarter of the channels. ``paper``: N = 100 of Table 1."""


FIGURE = "accuracy"


@judge_factory
def close(results: Results, one: str, other: str, within: float) -> Judged:
    """The mean of the paired differences is at most ``within`` either way."""
    differences = results.lead(one, other, FIGURE)
    return Judged(bool(abs(differences.mean()) <= within), told(differences))


@judge_factory
def sooner(
    results: Results, arm: str, others: Sequence[str], reference: str, share: float, *, slack: float = 0.0
) -> Judged:
    """``arm`` reaches ``share`` of the accuracy that ``reference`` of the same seed ends with; in the mean over the seeds it
    needs no more rounds than each of ``others`` and ``slack`` of theirs. An arm that never reaches it counts as one round
    more than there are."""
    rounds = {
        each: float(
            np.mean(
                [
                    first_reached(run["accuracy"], share * float(end))
                    for run, end in zip(results.lines[each], results.of(reference, FIGURE), strict=True)
                ]
            )
        )
        for each in (arm, *others)
    }
    held = all(rounds[arm] <= rounds[each] * (1 + slack) for each in others)
    return Judged(held, ", ".join(f"{name} {value:.1f}" for name, value in rounds.items()))


@judge_factory
def ahead_at_equal_bytes(results: Results, arm: str, other: str) -> Judged:
    """``arm`` ends ahead of where ``other`` stood when it had sent as much, or (in its favour) after its first round, where
    that is more already."""
    gains, rounds = [], []
    for mine, theirs in zip(results.lines[arm], results.lines[other], strict=True):
        total = mine["sent"][-1][0]
        known = [value for sent, value in theirs["sent"] if sent <= total] or [theirs["sent"][0][1]]
        gains.append(mine["sent"][-1][1] - known[-1])
        rounds.append(len(known))
    text = f"{told(np.array(gains))}; {other} after round {max(rounds)}"
    return Judged(bool(np.mean(gains) > 0), text)


LAST = 5
"""Rounds whose mean counts: the paper does not say which it reports (fedbat.md 4.3)."""


def measured(simulation: Simulation) -> Measurements:
    """Figures ``accuracy`` (mean of the last :data:`LAST` rounds), ``best``, ``up_kb`` (of one device in one round, headers
    included), ``ratio`` (float32 bytes over those) and ``up_mb`` (of all). Lines ``accuracy`` and ``loss`` by round, and
    ``sent``: accuracy by megabytes that all devices had sent."""
    rows = simulation.history
    accuracies = [(row, row.accuracy) for row in rows if row.accuracy is not None]
    last = [value for _, value in accuracies[-LAST:]]
    sent, up = {}, 0
    for row in rows:
        up += row.up_bytes
        sent[row.round] = up / 1e6
    reports = max(1, sum(row.reports for row in rows))
    return Measurements(
        {
            "accuracy": sum(last) / len(last),
            "best": max(value for _, value in accuracies),
            "up_kb": up / reports / 1e3,
            "ratio": sum(row.up_float32_bytes for row in rows) / max(1, up),
            "up_mb": up / 1e6,
        },
        {
            "accuracy": [(float(row.round), value) for row, value in accuracies],
            "sent": [(sent[row.round], value) for row, value in accuracies],
            "loss": [(float(row.round), row.loss) for row in rows if row.loss is not None],
        },
    )
