"""Per-FedAvg's Table 1, CIFAR-10 with 10 local steps beside 4."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from edgefl.papers.entry import Arm, Chart, Claim, Entry, Scale
from edgefl.papers.per_fedavg import personal, table1
from edgefl.papers.per_fedavg.judges import ahead, fewer_steps_lower
from edgefl.papers.per_fedavg.rows import FEDAVG, FO, HF, METHODS, Size, arms

MANY, FEW = table1.CIFAR_10, table1.CIFAR_4
ROWS = (MANY, FEW)
SIZES: Mapping[Scale, Size] = {
    "smoke": table1.SMOKE,
    "cpu": table1.CPU_CIFAR,
    "paper": table1.CIFAR_SIZE,
}


def all_arms(scale: Scale) -> Sequence[Arm]:
    return [arm for row in ROWS for arm in arms(row, METHODS, SIZES[scale])]


ENTRY = Entry(
    name="per_fedavg/local_steps",
    what="Per-FedAvg, Table 1: CIFAR-10 with 10 local steps beside 4",
    arms=all_arms,
    columns=table1.ENTRY.columns,
    published=table1.ENTRY.published,
    claims=(
        Claim("1", "with 10 local steps HF is ahead of FedAvg + update", "+9.95", ahead(HF, FEDAVG, (MANY,))),
        Claim("3", "with 10 local steps HF is ahead of FO", "+3.46", ahead(HF, FO, (MANY,))),
        Claim(
            "Table 1",
            "with 10 local steps FO is ahead of FedAvg + update",
            "+6.49",
            ahead(FO, FEDAVG, (MANY,)),
        ),
        Claim(
            "5",
            "4 local steps in place of 10 lower every method",
            "-2.11, -12.94, -6.71",
            fewer_steps_lower(((FEW, MANY),), personal.AFTER),
        ),
    ),
    charts=(
        Chart(
            "steps.svg",
            "CIFAR-10, tau = 10: users by steps of adaptation",
            personal.STEPS,
            x="steps",
            y="accuracy",
            arms=tuple(MANY.arm(each) for each in METHODS),
        ),
    ),
    note=(
        "The row of Table 1 that per_fedavg/table1 has at scale `paper` only, and beside it the row of tau = 4 with the "
        "same partition, initial weights and selections. All else as there."
    ),
)
