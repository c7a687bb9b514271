"""FedBAT's federations: Fashion-MNIST spread in three ways, and what each method sends (fedbat.md 3, 4)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from edgefl.papers.entry import Scale, Settings

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
            "program.batch": self.batch,
            "program.steps": self.steps,
            "program.lr": 0.1,
            "program.momentum": 0.0,
            "program.weight_decay": 0.0,
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
