"""Movement of submodels if no client holds the whole model (FIARSE, Figures 7 and 8; fiarse.md A12)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from edgefl.analysis.charts import line_chart
from reproduce.entry import Arm, Claim, Entry, Federated, Scale, percent
from reproduce.fiarse.federations import IMAGES, REPEATED, fiarse
from reproduce.fiarse.measures import LAGS, accuracies_and_exploration, by_size, label, reached, steadier
from reproduce.results import Results

SIZES = (0.04, 0.16, 0.36, 0.64)
RESNET, MLP = "ResNet", "MLP"
MLP_ROUNDS, CPU_CLIENTS = 200, 7
PAPER_KEEPS = 10
COVERED = 0.95


def arms(scale: Scale) -> Sequence[Arm]:
    """The convolutional net of the other entries, and a smaller one that affords more rounds."""
    setup = replace(REPEATED[scale], sizes=SIZES, keep_every=PAPER_KEEPS if scale == "paper" else 1)
    if scale == "cpu":
        setup = replace(setup, clients=CPU_CLIENTS)
    if scale == "smoke":
        setup = replace(setup, rounds=max(LAGS) + 2)
    dense = replace(setup, model={"name": "mlp", "options": {"hidden": [64, 32]}})
    if scale == "paper":
        dense = replace(dense, data=IMAGES["cpu"].data)
    if scale == "cpu":
        dense = replace(dense, rounds=MLP_ROUNDS)
    return (
        Federated(MLP, fiarse(dense), accuracies_and_exploration),
        Federated(RESNET, fiarse(setup), accuracies_and_exploration),
    )


def _drawn(results: Results) -> Mapping[str, str]:
    pictures = {}
    for arm in (MLP, RESNET):
        lines = {name: results.line(arm, name) for name in results.lines[arm][0]}
        coverage = {name: line for name, line in lines.items() if name.startswith(("ever", "explored"))}
        pictures[f"coverage-{arm}.svg"] = line_chart(
            coverage, title=f"{arm}: entries held so far", x="round", y="share of the parameters"
        )
        for lag in LAGS:
            names = [f"moved {lag} {label(gamma)}" for gamma in SIZES]
            moved = {name: lines[name] for name in names if lines.get(name)}
            if moved:
                pictures[f"difference-{lag}-{arm}.svg"] = line_chart(
                    moved, title=f"{arm}: masks {lag} models apart", x="round", y="difference"
                )
    return pictures


def _claims() -> Iterator[Claim]:
    doubts = {
        RESNET: "50 rounds of 25 steps are a hundredth of the paper's steps; coverage still rises when they end",
        MLP: "",
    }
    for arm, doubt in doubts.items():
        yield Claim(
            "H7",
            f"{arm}: {COVERED} of the parameters are trained at some time, though nobody holds more than 0.64",
            "never-trained parameters go to zero",
            reached(arm, "ever trained", COVERED),
            "high",
            doubt=doubt,
        )
        for lag in LAGS:
            apart = "one round" if lag == 1 else f"{lag} rounds"
            yield Claim(
                "H7",
                f"{arm}: masks {apart} apart differ less at the end than at first, and the larger the size, the less",
                "stabilise, larger ones sooner",
                steadier(arm, [label(gamma) for gamma in SIZES], lag),
                "high",
                doubt="what changes from round to round is mostly whose classes were drawn, at a constant learning rate",
            )


ENTRY = Entry(
    name="fiarse/exploration",
    what="FIARSE, Figures 7 and 8: which parameters are ever trained if nobody holds them all, and how masks settle",
    arms=arms,
    columns=(
        percent("ever trained", "ever trained, %"),
        *by_size("explored", SIZES),
        *(column for lag in LAGS for column in by_size(f"moved {lag}", SIZES)),
        percent("global", "global, %"),
        *by_size("global", SIZES),
    ),
    claims=tuple(_claims()),
    drawn=_drawn,
    note=(
        "Scale cpu: the data and the steps of fiarse/sizes, 28 clients in four sizes, 6 of them a round. ResNet: "
        f"the model of fiarse/sizes, 50 rounds. MLP: 784-64-32-10, {MLP_ROUNDS} rounds, because a step costs a "
        "fraction; it was taken, and its rounds were chosen with another seed, when the ResNet's coverage was seen "
        "to be 0.75 after 50 rounds. Ever trained: share of the maskable entries that any update has changed. "
        "Explored: share that the mask of a size has held in any round (fiarse.md A12, every size counted in every "
        "round). Moved: difference of the masks of two rounds, 1 and 10 apart (the specification has 1 and 50), in "
        "the mean over the last tenth of the rounds; claims compare it with the first tenth. At scale paper every "
        "tenth model counts. Figures 7 and 8 of the paper have no numbers."
    ),
)
