"""The federations of FedBAT's tables: its CNN on Fashion-MNIST, one codec against the other (fedbat.md 4)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from edgefl.papers.entry import Federated, Scale, Settings

Codec = tuple[str, Mapping[str, object]]

IID, NON_IID_1, NON_IID_2 = "IID", "Non-IID-1", "Non-IID-2"
PARTITIONS: Mapping[str, Settings] = {
    IID: {"data.partition": "iid"},
    NON_IID_1: {"data.partition": "dirichlet", "data.alpha": 0.3},
    NON_IID_2: {"data.partition": "labels", "data.labels_per_device": 3},
}


@dataclass(frozen=True)
class Size:
    """Of a federation: ``steps`` local ones of ``batch`` samples, ``taking_part`` of the ``clients`` a round."""

    clients: int
    taking_part: float
    rounds: int
    steps: int
    batch: int
    train_samples: int
    test_samples: int
    widths: tuple[int, ...]


SIZES: Mapping[Scale, Size] = {
    "smoke": Size(4, 0.5, 2, 2, 8, 400, 100, (4, 4, 4, 4)),
    "cpu": Size(20, 0.25, 12, 80, 64, 12_000, 2_000, (8, 16, 32, 64)),
    "paper": Size(100, 0.1, 100, 100, 64, 0, 0, (32, 64, 128, 256)),
}
"""``paper``: ten epochs of 600 samples are 100 steps."""

# The searched step sizes of fixed signs; the paper's grid is {1, .1, .01, .001} for each dataset.
_ALPHA: Mapping[Scale, Mapping[str, float]] = {
    "smoke": {"signsgd": 0.01, "noisy": 0.01, "stoc": 0.01},
    "cpu": {"signsgd": 0.01, "noisy": 0.01, "stoc": 0.01},
    "paper": {"signsgd": 0.001, "noisy": 0.01, "stoc": 0.01},
}


def codecs(scale: Scale) -> Mapping[str, Codec | None]:
    """By the name of the method; None: float32 weights."""
    alpha = _ALPHA[scale]
    return {
        "FedAvg": None,
        "FedBAT": ("fedbat", {}),
        "SignSGD": ("signsgd", {"alpha": alpha["signsgd"]}),
        "EF-SignSGD": ("ef_signsgd", {}),
        "Noisy-SignSGD": ("noisy_signsgd", {"alpha": alpha["noisy"], "sigma": alpha["noisy"]}),
        "Stoc-SignSGD": ("stoc_signsgd", {"alpha": alpha["stoc"]}),
        "FedPAQ, 4 bits": ("fedpaq", {"bits": 4}),
        "ZeroFL": ("zerofl", {}),
        "BiFL": ("bifl", {}),
    }


_OWN_TRAINING = frozenset({"fedbat", "zerofl", "bifl"})
"""Codecs that bring the local training with them."""


def arm(name: str, partition: str, codec: Codec | None, scale: Scale) -> Federated:
    """``name`` under ``partition``: SGD of rate 0.1 without momentum, and ``codec`` for what it changed."""
    size = SIZES[scale]
    settings: dict[str, object] = {
        "model.name": "fedbat_cnn",
        "model.options": {"widths": list(size.widths)},
        "data.name": "fashion_mnist",
        "data.train_samples": size.train_samples,
        "data.test_samples": size.test_samples,
        "federation.rounds": size.rounds,
        "round.fraction": size.taking_part,
        "program.batch": size.batch,
        "program.steps": size.steps,
        "program.lr": 0.1,
        "tiers": {"all": {"count": size.clients, "devices": ["all-*"]}},
        **PARTITIONS[partition],
    }
    if codec is None or codec[0] not in _OWN_TRAINING:
        settings["program.name"] = "fedavg"
    if codec is not None:
        settings["codec"] = {"name": codec[0], "options": dict(codec[1])}
    return Federated(f"{name}, {partition}", settings)
