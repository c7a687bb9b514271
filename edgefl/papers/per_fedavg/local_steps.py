"""The row of Per-FedAvg's Table 1 that takes longest: CIFAR-10 with 10 local steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from edgefl.papers.entry import Arm, Claim, Entry, Scale
from edgefl.papers.per_fedavg import table1
from edgefl.papers.per_fedavg.judges import ahead
from edgefl.papers.per_fedavg.rows import FEDAVG, FO, HF, METHODS, Size, arms, steps_chart

ROW = table1.CIFAR_10
SIZES: Mapping[Scale, Size] = {
    "smoke": table1.SMOKE,
    "cpu": table1.CPU_CIFAR,
    "paper": table1.CIFAR_SIZE,
}


def all_arms(scale: Scale) -> Sequence[Arm]:
    return arms(ROW, METHODS, SIZES[scale])


_FAR = (
    "with 10 steps all three end 16 to 26 points above the paper's numbers, and FedAvg's model has learned as much as HF's: "
    "how far 1000 rounds go is decided by the pixels' scale, which the paper does not say"
)
ENTRY = Entry(
    name="per_fedavg/local_steps",
    what="Per-FedAvg, Table 1: CIFAR-10 with 10 local steps",
    arms=all_arms,
    columns=table1.ENTRY.columns,
    published={ROW.arm(method): table1.ENTRY.published[ROW.arm(method)] for method in METHODS},
    claims=(
        Claim(
            "1",
            "with 10 local steps HF is ahead of FedAvg + update",
            "+9.95",
            ahead(HF, FEDAVG, (ROW,)),
            doubt=_FAR,
        ),
        Claim("3", "with 10 local steps HF is ahead of FO", "+3.46", ahead(HF, FO, (ROW,))),
        Claim(
            "Table 1",
            "with 10 local steps FO is ahead of FedAvg + update",
            "+6.49",
            ahead(FO, FEDAVG, (ROW,)),
            doubt=_FAR,
        ),
    ),
    charts=(steps_chart("steps.svg", "CIFAR-10, tau = 10", ROW, METHODS),),
    note="The row of Table 1 that per_fedavg/table1 has at scale `paper` only; all else as there.",
)
