"""Per-FedAvg's Table 1: accuracy of every user after one step of its own, by method and row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from reproduce.entry import Arm, Chart, Claim, Column, Entry, Scale, percent
from reproduce.per_fedavg import personal
from reproduce.per_fedavg.judges import ahead, change, claims_of_single_class, fewer_steps_lower
from reproduce.per_fedavg.rows import (
    FEDAVG,
    FO,
    FOUR_TIMES,
    HF,
    METHODS,
    TWICE,
    Row,
    Size,
    arms,
    steps_chart,
)

MNIST_10 = Row("MNIST", 10, 0.01, paper={FEDAVG: 0.7596, FO: 0.7800, HF: 0.7985})
MNIST_4 = Row("MNIST", 4, 0.01, paper={FEDAVG: 0.6018, FO: 0.6455, HF: 0.7094})
CIFAR_10 = Row("CIFAR-10", 10, 0.001, paper={FEDAVG: 0.4049, FO: 0.4698, HF: 0.5044})
CIFAR_4 = Row("CIFAR-10", 4, 0.001, paper={FEDAVG: 0.3838, FO: 0.3404, HF: 0.4373})
LARGER = Row("CIFAR-10", 4, 0.01, paper={FEDAVG: 0.3597, FO: 0.2532, HF: 0.4632})
SINGLE = Row("CIFAR-10", 4, 0.01, single=True, paper={FEDAVG: 0.5859, FO: 0.3771, HF: 0.7125})
ROWS = (MNIST_10, MNIST_4, CIFAR_10, CIFAR_4, LARGER, SINGLE)
MNIST_ROWS, CIFAR_ROWS = ROWS[:2], ROWS[2:]
SHORT_CIFAR = (CIFAR_4, LARGER, SINGLE)
"""With tau = 4."""

MNIST_SIZE = Size(rounds=1000, lr=0.001, a=196, a_test=32)
CIFAR_SIZE = Size(rounds=1000, lr=0.001, a=68, a_test=14, together=2)
CPU_CIFAR = replace(CIFAR_SIZE, a_test=36)
SMOKE = Size(rounds=2, lr=0.001, a=8, a_test=2, users=10, fraction=0.2)


def all_arms(scale: Scale) -> Sequence[Arm]:
    if scale == "paper":
        sizes = {each: MNIST_SIZE if each in MNIST_ROWS else CIFAR_SIZE for each in ROWS}
        matched = {MNIST_4: (TWICE, FOUR_TIMES), LARGER: (TWICE, FOUR_TIMES)}
        return [arm for each in ROWS for arm in arms(each, (*METHODS, *matched.get(each, ())), sizes[each])]
    if scale == "smoke":
        sized = [(row, SMOKE) for row in (MNIST_10, *CIFAR_ROWS)]
    else:
        sized = [(MNIST_10, MNIST_SIZE), *((row, CPU_CIFAR) for row in SHORT_CIFAR)]
    with_matched = arms(MNIST_4, (*METHODS, FOUR_TIMES), SMOKE if scale == "smoke" else MNIST_SIZE)
    return with_matched + [arm for row, size in sized for arm in arms(row, METHODS, size)]


_NOTE = (
    "ELU network 80-60, 50 users in ten groups, 10 of them in each round, batches of 40, HF's step 1e-2 / ||g||; pixels "
    "in [0, 1], not centred, which the paper does not say and which decides the curvature (per_fedavg.md 8.2). Scale "
    "`cpu` is the paper's own configuration (1000 rounds, beta 0.001, a = 196 and 68) with 36 test images of a class on "
    "CIFAR-10 in place of 14, for less noise, with FedAvg of as many gradients on MNIST alone, and without CIFAR-10's row "
    "of tau = 10, which per_fedavg/local_steps has. `literal` adapts to the test samples that judge, as the paper's words "
    "have it; everything else is adapted to training samples. `majority` is what always saying a user's own commonest "
    "class reaches. `gradients`: batch gradients of a user that takes part in every round."
)

ENTRY = Entry(
    name="per_fedavg/table1",
    what="Per-FedAvg, Table 1: mean accuracy of the users after one local step",
    arms=all_arms,
    columns=(
        percent(personal.AFTER, "after a step, %"),
        percent(personal.LITERAL, "literal, %"),
        percent(personal.BEFORE, "before, %"),
        percent(personal.GROUP_A, "half A, %"),
        percent(personal.GROUP_B, "half B, %"),
        percent(personal.MAJORITY, "majority, %"),
        Column(personal.KAPPA, "kappa"),
        Column(personal.CURVED, "alpha * lambda_max", digits=2),
        Column(personal.GRADIENTS, "gradients", digits=0),
    ),
    published={
        row.arm(method): {personal.AFTER: value}
        for row in ROWS
        for method, value in (row.paper or {}).items()
    },
    claims=(
        Claim(
            "1",
            "after one step HF is ahead of FedAvg + update, MNIST",
            "+3.89, +10.76",
            ahead(HF, FEDAVG, MNIST_ROWS),
        ),
        Claim(
            "1",
            "after one step HF is ahead of FedAvg + update, CIFAR-10",
            "+9.95, +5.35, +10.35, +12.66",
            ahead(HF, FEDAVG, CIFAR_ROWS),
        ),
        Claim("3", "HF is ahead of FO, MNIST", "+1.85, +6.39", ahead(HF, FO, MNIST_ROWS)),
        Claim("3", "HF is ahead of FO, CIFAR-10", "+3.46, +9.69, +21.00, +33.54", ahead(HF, FO, CIFAR_ROWS)),
        Claim(
            "Table 1",
            "FO is behind FedAvg + update on CIFAR-10 with tau = 4",
            "-4.34, -10.65, -20.88",
            ahead(FEDAVG, FO, SHORT_CIFAR),
            doubt="the specification's pilot did not find it either (9.3)",
        ),
        Claim(
            "2",
            "with the larger alpha HF improves or holds (1 point of slack)",
            "+2.59",
            change(HF, CIFAR_4, LARGER, personal.AFTER, least=-0.01, most=1),
            doubt="a step of 0.01 is too long here: alpha lambda_max is above 2, and half A is worse after it, with every "
            "method",
        ),
        Claim(
            "2",
            "with the larger alpha FO falls, after a step",
            "-8.72",
            change(FO, CIFAR_4, LARGER, personal.AFTER, least=-1, most=0),
            doubt="one step of the larger alpha makes up for what FO's model has lost before it",
        ),
        Claim(
            "2",
            "with the larger alpha FO's model collapses before the step (by 10 points or more)",
            "34.3 to 12.0 in the pilot (9.3)",
            change(FO, CIFAR_4, LARGER, personal.BEFORE, least=-1, most=-0.1),
        ),
        *claims_of_single_class(
            SINGLE,
            LARGER,
            "12.66 against 10.35",
            ("+22.62", "+12.39", "+24.93"),
            "one step teaches a user its only class, whatever it begins with: half B is at 100 % with all methods",
        ),
        Claim(
            "5",
            "4 local steps in place of 10 lower every method",
            "MNIST: -15.78, -13.45, -8.91; CIFAR-10: -2.11, -12.94, -6.71",
            fewer_steps_lower(((MNIST_4, MNIST_10), (CIFAR_4, CIFAR_10)), personal.AFTER),
        ),
        Claim(
            "6",
            "HF is ahead of FedAvg + update with as many gradients (4 tau), MNIST",
            "HF above FedAvg at equal time (Fig. 1a)",
            ahead(HF, FOUR_TIMES, (MNIST_4,)),
            doubt="after 1000 rounds no method has converged: four times the steps bring more than the better direction",
        ),
    ),
    charts=(
        steps_chart("steps-mnist.svg", "MNIST, tau = 4", MNIST_4, (*METHODS, FOUR_TIMES)),
        steps_chart("steps-cifar.svg", "CIFAR-10, tau = 4, alpha = 0.01", LARGER, METHODS),
        Chart(
            "rounds-mnist.svg",
            "MNIST, tau = 4: the global model without a step",
            "accuracy",
            arms=tuple(MNIST_4.arm(each) for each in (*METHODS, FOUR_TIMES)),
        ),
    ),
    note=_NOTE,
)


ROW = CIFAR_10
SIZES: Mapping[Scale, Size] = {
    "smoke": SMOKE,
    "cpu": CPU_CIFAR,
    "paper": CIFAR_SIZE,
}


def local_steps_arms(scale: Scale) -> Sequence[Arm]:
    return arms(ROW, METHODS, SIZES[scale])


_FAR = (
    "with 10 steps all three end 16 to 26 points above the paper's numbers, and FedAvg's model has learned as much as HF's: "
    "how far 1000 rounds go is decided by the pixels' scale, which the paper does not say"
)
LOCAL_STEPS_ENTRY = Entry(
    name="per_fedavg/local_steps",
    what="Per-FedAvg, Table 1: CIFAR-10 with 10 local steps",
    arms=local_steps_arms,
    columns=ENTRY.columns,
    published={ROW.arm(method): ENTRY.published[ROW.arm(method)] for method in METHODS},
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


REGIME_MAIN, REGIME_SINGLE = Row("MNIST", 4, 0.03), Row("MNIST", 4, 0.03, single=True)
REGIME_ROWS = (REGIME_MAIN, REGIME_SINGLE)
REGIME_SIZE = Size(rounds=300, lr=0.01, a=68, a_test=32, pixels="standard")
REGIME_SMOKE = replace(REGIME_SIZE, rounds=2, a=8, a_test=2, users=10)


def regime_arms(scale: Scale) -> Sequence[Arm]:
    size = REGIME_SMOKE if scale == "smoke" else REGIME_SIZE
    return [arm for row in REGIME_ROWS for arm in arms(row, (*METHODS, FOUR_TIMES), size)]


_EASY = "MNIST is easier than the pilot's images: with one class half B is at 99 to 100 % after a step of any method"
REGIME_ENTRY = Entry(
    name="per_fedavg/regime",
    what="Per-FedAvg where its Hessian matters: standardised MNIST, alpha = 0.03, beta = 0.01",
    arms=regime_arms,
    columns=ENTRY.columns,
    claims=(
        Claim(
            "1",
            "after one step HF is ahead of FedAvg + update",
            "+8.5, +12.8 in the pilot (9.3)",
            ahead(HF, FEDAVG, REGIME_ROWS),
        ),
        Claim("3", "HF is ahead of FO", "+5.9, +5.6 in the pilot (9.3)", ahead(HF, FO, REGIME_ROWS), doubt=_EASY),
        Claim("9.3", "FO is ahead of FedAvg + update", "+2.6, +7.2 in the pilot (9.3)", ahead(FO, FEDAVG, REGIME_ROWS)),
        *claims_of_single_class(
            REGIME_SINGLE, REGIME_MAIN, "12.8 against 8.5 in the pilot (9.3)", ("+2.8", "+7.4", "+7.1"), _EASY
        ),
        Claim(
            "6",
            "HF is ahead of FedAvg + update with as many gradients (4 tau)",
            "HF above FedAvg at equal time (Fig. 1a)",
            ahead(HF, FOUR_TIMES, REGIME_ROWS),
            doubt=_EASY,
        ),
    ),
    charts=tuple(
        steps_chart(f"steps-{name}.svg", title, row, (*METHODS, FOUR_TIMES))
        for row, name, title in (
            (REGIME_MAIN, "main", "Two classes in half B"),
            (REGIME_SINGLE, "single", "One class in half B"),
        )
    ),
    note=(
        "Not in the paper: the setting in which the specification's pilot on synthetic images finds the order HF, FO, "
        "FedAvg. MNIST standardised, 50 users, a = 68, a_test = 32, tau = 4, 300 rounds; all scales but smoke alike. "
        "Columns as in per_fedavg/table1."
    ),
)  # fmt: skip
