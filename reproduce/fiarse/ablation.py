"""Ablation of FIARSE's parts (FIARSE, Tables 6 and 7; fiarse.md A20, 8.3 R5)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from reproduce.entry import Arm, Chart, Claim, Entry, Federated, Scale, percent, shares
from reproduce.fiarse.federations import REPEATED, fiarse, heterofl, structured
from reproduce.fiarse.measures import above_all, by_size, label, measured
from reproduce.results import above, larger_lead

BOTH, BIAS, REMASKED, GREEDY = "FIARSE", "bias alone", "re-masking alone", "pruning-greedy"
LAYERS, CHANNELS = "FIARSE, layer-wise", "FIARSE by channels"
CPU_ROUNDS = 20
SMALL, MIDDLE, FULL = 1 / 16, 1 / 4, 1.0


def arms(scale: Scale) -> Sequence[Arm]:
    """The four switchings of TCB-GD, and two other ways to choose entries."""
    setup = REPEATED[scale]
    if scale == "cpu":
        setup = replace(setup, rounds=CPU_ROUNDS)
    measure = measured()
    return (
        Federated(BOTH, fiarse(setup), measure),
        Federated(GREEDY, fiarse(setup, algorithm__bias=False, algorithm__remask=False), measure),
        Federated(LAYERS, fiarse(setup, {"strategy": "layer"}), measure),
        Federated(CHANNELS, structured(setup), measure),
        Federated(BIAS, fiarse(setup, algorithm__remask=False), measure),
        Federated(REMASKED, fiarse(setup, algorithm__bias=False), measure),
    )


_TABLE_6: Mapping[str, tuple[float, ...]] = {
    BOTH: (41.76, 38.63, 39.53, 41.22, 38.71),
    GREEDY: (38.41, 35.24, 35.93, 38.23, 36.50),
    LAYERS: (36.83, 34.52, 35.94, 37.12, 34.46),
}
"""CIFAR-100, four sizes: local, global, global of 1/16, 1/4 and 1."""
_COLUMNS = (
    "local",
    "global",
    *(f"global {label(gamma)}" for gamma in (SMALL, MIDDLE, FULL)),
)

_NOTE = (
    f"Scale cpu: the federation of fiarse/sizes, {CPU_ROUNDS} rounds, learning rate 0.1; means over the last three "
    "models that were kept (after rounds 10, 15 and 20). Pruning-greedy is TCB-GD with both switches off: the mask "
    "of the round's start stays, and the gradient is the plain one; the other two have one of the switches "
    "(fiarse.md A20). Layer-wise: every tensor keeps the same share. By channels: the most important channels of "
    "every layer, relative to the layer's initial values, as a dense model (fiarse.md 8.3, R5), which is no part of "
    "the paper. Scale paper has CIFAR-10 (JPEG) where the paper has CIFAR-100. Published: Table 6, CIFAR-100."
)

ENTRY = Entry(
    name="fiarse/ablation",
    what="FIARSE, Tables 6 and 7: TCB-GD on and off, global and layer-wise thresholds, entries and channels",
    arms=arms,
    columns=(
        percent("global", "global, %"),
        percent("local", "local, %"),
        *by_size("global", (SMALL, MIDDLE, FULL)),
    ),
    claims=(
        Claim(
            "H3",
            "TCB-GD is ahead of pruning-greedy at the two smallest sizes",
            "+4.76, +3.60 (global, 1/64 and 1/16)",
            above_all(
                BOTH, (GREEDY,), [f"global {label(gamma)}" for gamma in (SMALL, MIDDLE)], every_seed=False
            ),
            "medium",
            doubt="the bias is a learning rate at most 1.5 times as large (fiarse.md 2.4), worth little in so few rounds",
        ),
        Claim(
            "H4",
            "the global threshold is ahead of the layer-wise one",
            "+4.11 (global), +4.93 (local)",
            above(BOTH, LAYERS, "global"),
            "medium",
            doubt="in a small net a global threshold empties whole layers at the smallest size (fiarse.md A9)",
        ),
        Claim(
            "R5",
            "by entries FIARSE is ahead of FIARSE by channels",
            "not in the paper",
            above(BOTH, CHANNELS, "global"),
        ),
    ),
    published=shares(_COLUMNS, _TABLE_6),
    charts=(
        Chart("global.svg", "Global accuracy, mean over sizes", "global", y="accuracy"),
        Chart(
            "global-smallest.svg",
            "Global accuracy of the smallest size",
            f"global {label(SMALL)}",
            y="accuracy",
        ),
    ),
    note=_NOTE,
)


FIARSE, HETEROFL = "FIARSE", "HeteroFL"
TWICE = ", twice as many"
PARTICIPATION_ROUNDS, CPU_PARTICIPANTS = 15, 3


def participation_arms(scale: Scale) -> Sequence[Arm]:
    """Each method with few participants, and with twice as many."""
    setup = REPEATED[scale]
    if scale == "cpu":
        setup = replace(setup, rounds=PARTICIPATION_ROUNDS, per_round=CPU_PARTICIPANTS)
    twice = replace(setup, per_round=2 * setup.per_round)
    measure = measured()
    return (
        Federated(FIARSE, fiarse(setup), measure),
        Federated(FIARSE + TWICE, fiarse(twice), measure),
        Federated(HETEROFL, heterofl(setup), measure),
        Federated(HETEROFL + TWICE, heterofl(twice), measure),
    )


_TABLES: Mapping[str, tuple[float, float]] = {
    FIARSE: (77.04, 73.75),
    FIARSE + TWICE: (79.65, 76.61),
    HETEROFL: (68.88, 66.05),
    HETEROFL + TWICE: (69.93, 67.92),
}
"""Tables 1 and 4, CIFAR-10: local, global."""

PARTICIPATION_ENTRY = Entry(
    name="fiarse/participation",
    what="FIARSE, Table 4: twice as many participants in each round",
    arms=participation_arms,
    columns=(percent("global", "global, %"), percent("local", "local, %")),
    claims=(
        Claim(
            "H9",
            "locally FIARSE gains more from twice the participants than HeteroFL",
            "+2.61 against +1.05",
            larger_lead((FIARSE + TWICE, FIARSE), (HETEROFL + TWICE, HETEROFL), "local"),
            "low",
            doubt="15 rounds are the steep part of both curves, where any more training helps, and HeteroFL, which begins "
            "slower, the more",
        ),
    ),
    published=shares(("local", "global"), _TABLES),
    charts=(Chart("global.svg", "Global accuracy, mean over sizes", "global", y="accuracy"),),
    note=(
        f"Scale cpu: the federation of fiarse/sizes with {CPU_PARTICIPANTS} and {2 * CPU_PARTICIPANTS} of its 30 "
        f"clients a round (the paper's 10 % and 20 %), {PARTICIPATION_ROUNDS} rounds; means over the last three models that "
        "were kept (after rounds 5, 10 and 15). Published: Tables 1 and 4, CIFAR-10."
    ),
)
