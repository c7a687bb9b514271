"""Table 2 and the training losses beside it (Figures 2a, 3a and 4a): Fashion-MNIST at three levels of heterogeneity."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from edgefl.analysis.charts import line_chart
from reproduce.entry import Arm, Chart, Claim, Column, Entry, Federated, Scale, percent
from reproduce.fafed.federations import (
    FAFED,
    FEDADAM,
    FEDAMS,
    FEDAVG,
    METHODS,
    SCAFFOLD,
    STEM,
    Setup,
    Tuned,
    tuned,
)
from reproduce.fafed.measures import (
    GRADIENTS,
    MEGABYTES,
    OBJECTIVE,
    against,
    dearer,
    lowest,
    measured,
    none_above,
    sends,
    smoother,
)
from reproduce.fafed.models import FASHION_CNN
from reproduce.results import Results, above, ahead_of_each

LOW, MEDIUM, HIGH = "low", "medium", "high"
LEVELS = (LOW, MEDIUM, HIGH)


@dataclass(frozen=True)
class Level:
    """A way to spread samples, and the paper's batch and q for it: the more unlike, the larger batches, the fewer steps."""

    partition: str
    batch: int
    steps: int
    small: tuple[int, int]
    """Batch and q at scale cpu."""


SPREAD: Mapping[str, Level] = {
    LOW: Level("similarity", 5, 20, (5, 20)),
    MEDIUM: Level("dirichlet_equal", 50, 10, (20, 10)),
    HIGH: Level("paired", 100, 5, (40, 5)),
}


def setup(scale: Scale, level: str) -> Setup:
    """Return the settings that all methods share at ``level``."""
    own = SPREAD[level]
    data = {"name": "fashion_mnist", "partition": own.partition}
    whole = Setup(
        clients=20,
        rounds={LOW: 900, MEDIUM: 180, HIGH: 180}[level],
        batch=own.batch,
        steps=own.steps,
        model={"name": FASHION_CNN},
        data={**data, "test_samples": 0},
        keep_every={LOW: 10, MEDIUM: 2, HIGH: 2}[level],
        evaluate_every={LOW: 10, MEDIUM: 2, HIGH: 2}[level],
        together=20,
        looked_at=10_000,
    )
    if scale == "paper":
        return whole
    few = {**data, "train_samples": 20_000, "test_samples": 2_000}
    batch, steps = own.small
    reduced = replace(
        whole,
        clients=10,
        rounds=60,
        batch=batch,
        steps=steps,
        data=few,
        keep_every=2,
        evaluate_every=2,
        together=10 if level == LOW else 1,
        looked_at=1_000,
    )
    if scale == "cpu":
        return reduced
    return replace(
        reduced,
        clients=2,
        rounds=4,
        batch=4,
        steps=2,
        data={**few, "train_samples": 200, "test_samples": 100},
        keep_every=1,
        together=1,
        looked_at=100,
    )


LARGEST_STEP = 0.1
"""Of the paper's grid."""
PAPERS_STEP = f"FedAvg at {LARGEST_STEP}"
"""FedAvg with that step, where a longer grid has a better one."""


SERVER_STEP = 0.0316
"""10^-1.5, the largest of the paper's grid."""


def _server(beta1: float, beta2: float) -> Mapping[str, float]:
    return {"lr": SERVER_STEP, "beta1": beta1, "beta2": beta2}


TUNED: Mapping[str, Mapping[str, Tuned]] = {
    LOW: tuned(
        0.2,
        fafed={"lr": 0.005, "alpha": 0.9, "beta": 0.9},
        fedadam=_server(0.1, 0.9),
        fedams=_server(0.1, 0.9),
    ),
    MEDIUM: tuned(
        0.4,
        fafed={"lr": 0.02, "alpha": 0.9, "beta": 0.9},
        fedadam=_server(0.1, 0.1),
        fedams=_server(0.1, 0.9),
    ),
    HIGH: tuned(
        0.4,
        fafed={"lr": 0.02, "alpha": 0.9, "beta": 0.1},
        fedadam=_server(0.1, 0.1),
        fedams=_server(0.1, 0.9),
    ),
}
"""At scale cpu, and in smoke; scale paper has no longer steps than the paper's grid."""


def _tuned(scale: Scale, level: str, method: str) -> Tuned:
    own = TUNED[level][method]
    if scale != "paper":
        return own
    return replace(own, algorithm={**own.algorithm, "lr": min(own.algorithm["lr"], LARGEST_STEP)})


def arm_of(method: str, level: str) -> str:
    """The name of an arm."""
    return f"{method}, {level}"


def _of(level: str) -> tuple[str, ...]:
    return tuple(arm_of(method, level) for method in METHODS)


def _drawn_at(level: str) -> tuple[str, ...]:
    return (*_of(level), arm_of(PAPERS_STEP, level))


def arms(scale: Scale) -> Sequence[Arm]:
    """Every method at every level."""
    made = []
    for level in LEVELS:
        alike = setup(scale, level)
        measure = measured(alike.looked_at)
        made += [
            Federated(arm_of(name, level), alike.method(name, _tuned(scale, level, name)), measure)
            for name in METHODS
        ]
        slower = alike.method(FEDAVG, Tuned({"lr": LARGEST_STEP}))
        made.append(Federated(arm_of(PAPERS_STEP, level), slower, measure))
    return made


_TABLE_2: Mapping[str, tuple[float, float, float]] = {
    FEDAVG: (0.8451, 0.8454, 0.7958),
    SCAFFOLD: (0.8496, 0.8461, 0.8034),
    STEM: (0.8562, 0.8551, 0.8053),
    FEDADAM: (0.8586, 0.8581, 0.8040),
    FEDAMS: (0.8697, 0.8615, 0.8015),
    FAFED: (0.8816, 0.8654, 0.8188),
}
_AHEAD = {LOW: "+1.19 on FedAMS", MEDIUM: "+0.39 on FedAMS", HIGH: "+1.35 on STEM"}
_AHEAD_OF_FEDAVG = {LOW: "+3.65", MEDIUM: "+2.00", HIGH: "+2.30"}


_LONGER_GRID = (
    "with client steps of 0.4, outside the paper's grid, FedAdam and FedAMS are as quick here; at 0.1, where it ends, "
    "the better one was behind FAFED in the pilot (loss 0.48 and 0.43 at medium, 0.52 and 0.48 at high)"
)


def _claims_at(level: str) -> tuple[Claim, ...]:
    fafed, *others = _of(level)
    fedavg = arm_of(FEDAVG, level)
    adaptive = [arm_of(name, level) for name in (STEM, FEDADAM, FEDAMS)]
    return (
        Claim(
            "3",
            f"{level} heterogeneity: FAFED has the best test accuracy",
            _AHEAD[level],
            ahead_of_each(fafed, others, "accuracy"),
            "low",
            doubt="the methods are nearer to each other than one method's seeds are, as the specification expects",
        ),
        Claim(
            "3",
            f"{level} heterogeneity: FAFED's test accuracy is ahead of FedAvg's",
            _AHEAD_OF_FEDAVG[level],
            above(fafed, fedavg, "accuracy"),
        ),
        Claim(
            "3",
            f"{level} heterogeneity: FAFED's test accuracy is ahead of FedAvg's at {LARGEST_STEP}, the largest step of the "
            "paper's grid",
            _AHEAD_OF_FEDAVG[level],
            above(fafed, arm_of(PAPERS_STEP, level), "accuracy"),
        ),
        Claim(
            "4",
            f"{level} heterogeneity: FAFED has the lowest training loss after equal rounds",
            "lowest",
            lowest(fafed, others, OBJECTIVE),
            "high",
            doubt=_LONGER_GRID,
        ),
        Claim(
            "4",
            f"{level} heterogeneity: STEM, FedAdam and FedAMS have no higher training loss than FedAvg after equal rounds",
            "",
            none_above(adaptive, fedavg, OBJECTIVE),
            "high",
        ),
    )


_ACROSS = (
    Claim(
        "4",
        "FAFED's training loss rises less at the start than FedAdam's and FedAMS's, at every level",
        "smoother",
        smoother(
            {arm_of(FAFED, level): (arm_of(FEDADAM, level), arm_of(FEDAMS, level)) for level in LEVELS},
            "rises",
        ),
        doubt="at their best steps the losses of all three hardly rise here, and single rises of one seed decide",
    ),
    Claim(
        "8.15",
        "FAFED's lead in training loss on FedAvg shrinks where bytes or gradients are equal in place of rounds",
        "not looked at",
        dearer({arm_of(FAFED, level): arm_of(FEDAVG, level) for level in LEVELS}, (MEGABYTES, GRADIENTS)),
    ),
    Claim(
        "17",
        "FAFED sends three floats for each parameter, STEM and SCAFFOLD two, all others one",
        "3, 2, 1",
        sends(
            {
                arm_of(method, level): {FAFED: 3.0, STEM: 2.0, SCAFFOLD: 2.0}.get(method, 1.0)
                for level in LEVELS
                for method in METHODS
            }
        ),
        exact=True,
    ),
)


def _drawn(results: Results) -> dict[str, str]:
    drawn = {}
    for level in LEVELS:
        for x, title in (
            (MEGABYTES, "megabytes, up and down"),
            (GRADIENTS, "gradients of samples, thousands"),
        ):
            lines = against(results, _drawn_at(level), x)
            name = f"training-loss-{level}-by-{x}.svg"
            drawn[name] = line_chart(
                lines, title=f"Training loss, {level} heterogeneity", x=title, y="training loss", log_y=True
            )
    return drawn


_NOTE = (
    "Scale cpu: the paper's CNN with linear logits (26,620 parameters), 20,000 training samples of Fashion-MNIST over "
    "10 clients of equal size, all in every round, 2,000 test samples, 60 rounds, constant steps. Low: 95 % "
    "similarity, b = 5, q = 20; medium: Dirichlet(1) mixes of all classes, b = 20, q = 10; high: half of the classes, "
    "b = 40, q = 5. The paper has 20 clients, all samples, b = 5, 50 and 100, and an unknown number of epochs; scale "
    "paper has 30. FAFED's and STEM's first round is their opening exchange. Training loss: of the averaged model on "
    "1,000 training samples after every second round, in the mean over the last tenth of these; rises at the start: "
    "all its rises in the first quarter.\n\n"
    "Steps, momenta and decays were chosen by the loss on other training samples after 30 rounds of seed 100, "
    "coordinate by coordinate, for each level: FAFED eta of 0.005, 0.01, 0.02 (high 0.003 and 0.04, medium 0.04 too), "
    "alpha and beta of 0.1 and 0.9; STEM eta of 0.2 and 0.4 (high 0.1 too), alpha of 0.9 (high 0.1 too); FedAvg and "
    "SCAFFOLD 0.1, 0.2, 0.4 (FedAvg 0.8 too, medium and high); FedAdam and FedAMS the client's step of 0.1, 0.2 "
    "(medium and high 0.4 too), the server's of 0.0316 and 0.01, beta1 and beta2 of 0.1 and 0.9. The paper's grid "
    "ends at 0.1, which is too small for 60 rounds: FedAvg stands here with 0.1 as well, and scale paper keeps to the "
    "paper's grid. rho = tau = 0.01; FedAMS divides by the root of the largest second moment plus tau (fafed.md 3.5)."
)

ENTRY = Entry(
    name="fafed/table2",
    what="FAFED, Table 2 and Figures 2a to 4a: Fashion-MNIST at three levels of heterogeneity, six methods",
    arms=arms,
    columns=(
        percent("accuracy", "test accuracy, %"),
        Column(OBJECTIVE, "training loss", digits=4),
        Column("rises", "rises at the start"),
        Column("up_mb", "MB up", digits=1),
        Column("down_mb", "MB down", digits=1),
        Column(GRADIENTS, "gradients, thousands", digits=0),
    ),
    claims=(*(claim for level in LEVELS for claim in _claims_at(level)), *_ACROSS),
    published={
        arm_of(name, level): {"accuracy": value}
        for name, values in _TABLE_2.items()
        for level, value in zip(LEVELS, values, strict=True)
    },
    charts=tuple(
        chart
        for level in LEVELS
        for chart in (
            Chart(
                f"training-loss-{level}.svg",
                f"Training loss, {level} heterogeneity",
                OBJECTIVE,
                y="training loss",
                arms=_drawn_at(level),
                log_y=True,
            ),
            Chart(
                f"accuracy-{level}.svg",
                f"Test accuracy, {level} heterogeneity",
                "accuracy",
                arms=_drawn_at(level),
            ),
        )
    ),
    drawn=_drawn,
    note=_NOTE,
)
