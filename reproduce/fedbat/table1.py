"""Table 1 of FedBAT, and what comes from its runs: Tables 2 and 3, Figures 2 and 3 (fedbat.md 5).

SVHN and CIFAR-100 (not at hand). A run at scale paper on one core (42 ms a step of the CNN, 237 ms of ResNet-10, from slices
of 150 and 16 steps): Fashion-MNIST 1.3 h with 100 clients, 3.9 h with 30; CIFAR-10 11 h and 36 h. Three seeds of all:
1,840 h on 2 cores, 58 h on 64; of FedAvg, EF-SignSGD and FedBAT on Fashion-MNIST, 100 clients, Non-IID-2: 6 h on 2 cores,
1.3 h on 64. One GPU: about as 20 cores (an estimate, none was at hand).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

from reproduce.entry import OURS_JPEG, Arm, Chart, Claim, Entry, Scale, grid, larger_lead, note_of, part
from reproduce.fedbat.federations import DATA, METHODS, NOTE, PARTITIONS, ahead, arm, by_method, federated

TABLE_1 = {
    30: {
        "FedAvg": (92.5, 90.7, 88.9, 92.7, 90.9, 89.2, 91.5, 89.0, 83.7, 67.7, 64.1, 54.5),
        "SignSGD": (91.3, 86.5, 78.9, 92.3, 80.1, 66.1, 88.9, 87.8, 76.1, 58.9, 53.9, 34.3),
        "EF-SignSGD": (92.3, 90.5, 88.6, 92.6, 90.7, 88.3, 90.8, 87.4, 78.3, 65.6, 59.7, 50.7),
        "Noisy-SignSGD": (92.1, 90.3, 87.6, 92.2, 90.3, 88.2, 90.1, 86.2, 78.3, 65.3, 58.3, 46.6),
        "Stoc-SignSGD": (91.7, 89.5, 82.6, 92.3, 88.0, 86.7, 88.7, 86.2, 77.8, 61.1, 57.8, 46.2),
        "ZeroFL": (91.0, 89.3, 87.4, 91.7, 90.2, 87.6, 89.0, 86.3, 79.0, 63.7, 59.9, 47.7),
        "FedBAT": (92.5, 90.8, 89.1, 92.9, 91.1, 89.3, 91.2, 88.6, 82.8, 66.3, 63.9, 53.9),
    },
    100: {
        "FedAvg": (92.0, 90.5, 88.7, 92.1, 89.7, 88.9, 89.3, 84.6, 80.9, 59.2, 55.4, 49.0),
        "SignSGD": (90.3, 88.2, 80.5, 90.7, 80.4, 64.7, 87.3, 82.2, 76.6, 54.2, 39.3, 32.5),
        "EF-SignSGD": (91.3, 89.7, 87.4, 91.8, 89.2, 86.8, 87.4, 81.8, 76.6, 53.8, 46.8, 40.2),
        "Noisy-SignSGD": (91.0, 89.4, 86.9, 90.9, 88.7, 86.9, 85.5, 80.2, 72.7, 52.6, 46.2, 38.3),
        "Stoc-SignSGD": (90.6, 88.5, 84.8, 90.7, 87.7, 84.8, 85.9, 80.5, 74.1, 54.2, 47.2, 40.1),
        "ZeroFL": (90.2, 88.8, 86.6, 90.3, 88.4, 87.0, 85.2, 78.4, 73.8, 50.5, 45.6, 36.1),
        "FedBAT": (91.8, 90.6, 89.0, 92.5, 90.7, 89.2, 89.2, 84.9, 81.0, 58.6, 54.3, 49.2),
    },
}
"""Paper's accuracy in percent by COLUMNS, for 30 and 100 clients."""
RHO = {
    "Fashion-MNIST": (87.9, 88.2, 88.9, 89.0, 88.7, 88.9), "SVHN": (88.5, 89.0, 89.2, 89.2, 89.5, 88.7),
    "CIFAR-10": (78.3, 79.0, 80.4, 81.0, 80.6, 80.1), "CIFAR-100": (41.2, 48.0, 48.7, 49.2, 48.8, 48.7),
}  # fmt: skip
PHI = {
    "Fashion-MNIST": (88.6, 88.7, 89.0, 89.0, 88.5), "SVHN": (88.4, 88.8, 89.2, 88.5, 88.6),
    "CIFAR-10": (75.9, 79.9, 81.0, 80.7, 80.3), "CIFAR-100": (42.9, 48.6, 49.2, 48.9, 48.3),
}  # fmt: skip
RHOS, PHIS = ("0", "2", "4", "6", "8", "10"), ("0.1", "0.3", "0.5", "0.7", "0.9")
VARIANTS = [f"rho={rho}" for rho in RHOS if rho != "6"] + [f"phi={phi}" for phi in PHIS if phi != "0.5"]
FEW: dict[str, Sequence[str]] = {
    "IID": ["FedAvg", "SignSGD", "EF-SignSGD", "FedBAT"],
    "Non-IID-1": ["FedAvg", "EF-SignSGD", "FedBAT"],
    "Non-IID-2": [*METHODS, "rho=0", "phi=0.1"],
}
"""Arms at scales smoke and cpu: on Fashion-MNIST, 100 clients."""


def arms(scale: Scale) -> Sequence[Arm]:
    """Return the arms of Tables 1 to 3."""
    every: dict[str, Sequence[str]] = dict.fromkeys(PARTITIONS, METHODS)
    skewed = every | {"Non-IID-2": [*METHODS, *VARIANTS]}
    paper = [(data, clients, skewed if clients == 100 else every) for data in DATA for clients in TABLE_1]
    return [
        federated(data, clients, partition, method, scale)
        for data, clients, rows in (paper if scale == "paper" else [("Fashion-MNIST", 100, FEW)])
        for partition, methods in rows.items()
        for method in methods
    ]


def at(method: str, partition: str = "Non-IID-2", data: str = "Fashion-MNIST") -> str:
    """Return the name of an arm with 100 clients."""
    return arm(data, 100, partition, method)


def _variants(name: str, usual: str) -> Callable[[str, str], tuple[str, str]]:
    return lambda data, value: (at("FedBAT" if value == usual else f"{name}={value}", data=data), "accuracy")


NEEDS = note_of(__doc__)
VARIED = f"100 clients, Non-IID-2; runs of Table 1 and their variants. FedBAT: rho = 6, phi = 0.5. {NOTE}"
TABLE1 = Entry(
    "fedbat/table1", "Table 1: accuracy of the methods", arms,
    grids=[by_method(clients, rows) for clients, rows in TABLE_1.items()],
    claims=[
        ahead("FedBAT", ["EF-SignSGD"], "+0.5", partition="IID"),
        ahead("FedBAT", ["EF-SignSGD"], "+0.9", partition="Non-IID-1"),
        ahead("FedBAT", ["EF-SignSGD"], "+1.6"),
        ahead("FedBAT", ["SignSGD", "Stoc-SignSGD"], "+8.5, +4.2"),
        ahead("FedBAT", ["Noisy-SignSGD", "ZeroFL"], "+2.1, +2.4"),
        ahead("FedBAT", ["FedAvg"], "-0.2", partition="IID", margin=0.01),
        ahead("FedBAT", ["FedAvg"], "+0.1", partition="Non-IID-1", margin=0.01),
        ahead("FedBAT", ["FedAvg"], "+0.3", margin=0.01),
        Claim(
            "SignSGD trails FedAvg more than at IID",
            larger_lead((at("FedAvg"), at("SignSGD")), (at("FedAvg", "IID"), at("SignSGD", "IID")), "accuracy"),
            paper="+6.5",
        ),
        ahead("Noisy-SignSGD", ["SignSGD"], "+6.4"),
        ahead("Stoc-SignSGD", ["SignSGD"], "+4.3"),
        ahead("EF-SignSGD", ["SignSGD", "Stoc-SignSGD"], "+6.9, +2.6"),
        ahead("EF-SignSGD", ["Noisy-SignSGD", "ZeroFL"], "+0.5, +0.8"),
    ],
    note=NOTE, needs=NEEDS, other_data="CIFAR-10 as JPEG (q75) in that column",
)  # fmt: skip


def _shows(*methods: str) -> Callable[[str], bool]:
    """Return the function that accepts arms with 100 clients at Non-IID-2 of these methods."""
    return lambda name: name.endswith(tuple(f"N=100, Non-IID-2: {method}" for method in methods))


TABLE2 = part(
    TABLE1, "fedbat/table2", "Table 2: pace of the learned step sizes (rho)",
    _shows("FedBAT", "EF-SignSGD", *(f"rho={rho}" for rho in RHOS)),
    grids=[grid("data set", RHOS, RHO, _variants("rho", "6"), title=OURS_JPEG)],
    claims=[ahead("FedBAT", ["rho=0"], "+1.1"), ahead("rho=0", ["EF-SignSGD"], "+0.5")],
    note=VARIED, needs=NEEDS,
)  # fmt: skip
TABLE3 = part(
    TABLE1, "fedbat/table3", "Table 3: share of full-precision steps (phi)",
    _shows("FedBAT", *(f"phi={phi}" for phi in PHIS)),
    grids=[grid("data set", PHIS, PHI, _variants("phi", "0.5"), title=OURS_JPEG)],
    claims=[ahead("FedBAT", ["phi=0.1"], "+0.4")],
    note=VARIED, needs=NEEDS,
)  # fmt: skip
FIGURE2 = Entry(
    "fedbat/figure2", "Figure 2: accuracy by round, CIFAR-100",
    needs="CIFAR-100 (not at hand), and as many hours as CIFAR-10 in `fedbat/table1`.",
)  # fmt: skip
_DRAWN = {each: [at(method, each) for method in METHODS] for each in PARTITIONS}
FIGURE3 = part(
    TABLE1, "fedbat/figure3", "Figure 3: accuracy by round, 100 clients", lambda name: name in chain(*_DRAWN.values()),
    claims=[ahead("FedBAT", pair, "above", figure="mean") for pair in (METHODS[1:3], METHODS[3:5])],
    charts=[
        Chart(f"{each.lower()}.svg", f"Fashion-MNIST, {each}", "accuracy", arms=drawn) for each, drawn in _DRAWN.items()
    ],
    note=f"Fashion-MNIST, runs of Table 1. The claim is about the mean accuracy over all rounds. {NOTE}", needs=NEEDS,
)  # fmt: skip
