"""Tables 5 and 6 of FedBAT: more baselines, and more clients (fedbat.md 5)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import product

from reproduce.entry import JPEG, OURS_JPEG, Arm, Entry, Scale, grid
from reproduce.fedbat.federations import DATA, NOTE, PARTITIONS, ahead, arm, by_method, federated

BASELINES = ("FedAvg", "SignSGD", "FedPAQ 3b", "FedPAQ 4b", "BiFL", "BiFL-Full", "FedBAT")
TABLE_5 = {
    "IID": (89.3, 87.3, 88.8, 89.1, 61.8, 86.8, 89.2),
    "Non-IID-1": (84.6, 82.2, 83.9, 84.5, 37.4, 84.3, 84.9),
    "Non-IID-2": (80.9, 76.6, 80.5, 80.8, 25.1, 79.6, 81.0),
}
TABLE_6 = {
    "FedAvg": (91.6, 90.2, 88.4, 91.4, 88.6, 87.8, 84.9, 81.0, 78.2, 49.7, 48.8, 42.9),
    "SignSGD": (89.5, 87.5, 80.2, 89.6, 79.6, 67.6, 84.2, 77.8, 71.0, 46.1, 34.2, 30.8),
    "FedBAT": (91.4, 89.9, 88.1, 91.4, 89.2, 87.8, 85.0, 80.8, 77.8, 49.1, 48.4, 43.2),
}


def _arms(data: Sequence[str], clients: int, methods: Iterable[str], scale: Scale) -> Sequence[Arm]:
    """Return the arms of a table; at the small scales those of its first data set and of the most skewed partition."""
    if scale == "paper":
        return [federated(*row, scale) for row in product(data, [clients], PARTITIONS, methods)]
    return [federated(data[0], clients, "Non-IID-2", method, scale) for method in methods]


TABLE5 = Entry(
    "fedbat/table5", "Table 5: more baselines, CIFAR-10 with 100 clients", partial(_arms, ["CIFAR-10"], 100, BASELINES),
    grids=[
        grid(
            "partition", BASELINES, TABLE_5, lambda row, method: (arm("CIFAR-10", 100, row, method), "accuracy"),
            title=OURS_JPEG,
        )
    ],
    claims=[
        ahead("FedBAT", ["FedPAQ 3b", "FedPAQ 4b"], "+0.5, +0.2", data="CIFAR-10"),
        ahead("SignSGD", ["BiFL"], "+51.5", data="CIFAR-10"),
        ahead("BiFL-Full", ["BiFL"], "+54.5", data="CIFAR-10"),
    ],
    note=f"At scale cpu the CNN for 3x32x32 images in place of ResNet-10; no augmentation. {NOTE}",
    needs="11 h a run on one core (slice as in `fedbat/table1`). Three seeds of all: 350 h on 2 cores, 11 h on 64.",
    other_data=JPEG,
)  # fmt: skip
TABLE6 = Entry(
    "fedbat/table6", "Table 6: 200 clients", partial(_arms, [*DATA], 200, TABLE_6), grids=[by_method(200, TABLE_6)],
    claims=[
        ahead("FedBAT", ["FedAvg"], "-0.3", clients=200, margin=0.01),
        ahead("FedBAT", ["SignSGD"], "+7.9", clients=200),
    ],
    note=NOTE,
    needs="SVHN and CIFAR-100 (not at hand). On one core 0.7 h a run on Fashion-MNIST, 5.8 h on CIFAR-10 (slices as in "
    "`fedbat/table1`). Three seeds of all: 85 h on 2 cores, 6 h on 64.",
)  # fmt: skip
